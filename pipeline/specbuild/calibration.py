"""Calibration: text to token sequences, and the scales of a whole model found layer by layer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from specbuild.artifacts import TllmCheckpoint
from specbuild.config import QuantizeConfig
from specbuild.errors import ConfigError
from specbuild.progress import bar, log
from specbuild.provenance import find_version
from specbuild.quant import Levels, LinearScales, QuantScheme, RoundedScales, Scales, find_scheme, plan_rounded
from specbuild.shape import ModelShape
from specbuild.tensorfile import TensorWriter

if TYPE_CHECKING:
    import torch

    from specbuild.decoder import Chunk, DecoderLayer

HOLD_OUT = 8  # every eighth sequence is kept for measuring quality, and never calibrated on
SHORTEST = 8  # tokens: shorter sequences say little
PIECE = 1 << 14  # characters of a .txt that are tokenized at once
BUILTIN = "builtin"
DEFAULT_LENGTH = 512  # tokens of a sequence, where there is no calibration to say


@dataclass(frozen=True)
class Text:
    """Token sequences of a text: to calibrate on, and to measure quality on."""

    calibration: list[list[int]]
    held_out: list[list[int]]


def check_calibration(settings: QuantizeConfig, yaml_path: Path) -> None:
    """Raise ConfigError for a calibration that the scheme cannot use or do without, or whose text is not there."""
    scheme, calibration = find_scheme(settings.scheme), settings.calibration
    if settings.rounding == "gptq" and scheme.name != "int4_awq":
        raise ConfigError(f"Cannot round by gptq with scheme {scheme.name!r}: expected int4_awq. Remove `rounding`, or change the scheme.")
    if calibration is None:
        if scheme.needs_calibration or settings.rounding == "gptq":
            what = "rounding gptq" if settings.rounding == "gptq" else f"scheme {scheme.name!r}"
            raise ConfigError(
                f"Cannot quantize with {what} and no calibration: it needs activations. Add `calibration: {{data: {BUILTIN}}}`."
            )
    elif scheme.recipe is None:
        raise ConfigError(f"Cannot calibrate scheme {scheme.name!r}: it has no scales to find. Remove `calibration`, or use int4_awq.")
    elif settings.rounding == "nearest" and find_version("nvidia-modelopt") == "absent":
        raise ConfigError("Cannot calibrate: nvidia-modelopt is not installed. Run `pip install 'specbuild[calibrate]'`.")
    quality = settings.quality
    if not quality.samples and (quality.max_kl is not None or quality.min_top1 is not None):
        raise ConfigError("Cannot hold a limit of quality with samples 0: nothing would be measured. Remove the limit, or `samples: 0`.")
    text_files(settings, yaml_path)


def find_text_files(data: str, yaml_path: Path) -> list[Path]:
    """List the files of a text: a .jsonl or .txt file, those in a directory, or the one that comes along."""
    if data == BUILTIN:
        return [Path(str(resources.files("specbuild") / "calibration.jsonl"))]
    path = yaml_path.parent / os.path.expanduser(data)  # noqa: PTH111  Path.expanduser raises for an unknown user
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.suffix in (".jsonl", ".txt") and each.is_file())
    else:
        found = [path] if path.is_file() and path.suffix in (".jsonl", ".txt") else []
    if not found:
        raise ConfigError(
            f"Cannot use text {data}: {path} is no .jsonl or .txt file, nor a directory of them. Paths are relative to {yaml_path}; "
            f"`{BUILTIN}` is a text that comes along."
        )
    return found


def text_files(settings: QuantizeConfig, yaml_path: Path) -> dict[str, list[Path]]:
    """Return the files that a quantization reads, by what for: one list twice where both uses have the same files, by whatever name.

    Raise ConfigError for two texts that share some files but not all.
    """
    files = {}
    if settings.calibration is not None:
        files["calibration"] = find_text_files(settings.calibration.data, yaml_path)
    if settings.quality.samples:
        shared = BUILTIN if settings.calibration is None else settings.calibration.data
        files["quality"] = find_text_files(settings.quality.data or shared, yaml_path)
    one, other = ({path.resolve() for path in files.get(use, [])} for use in ("calibration", "quality"))
    if one and one == other:
        files["quality"] = files["calibration"]
    elif one & other:
        raise ConfigError(
            f"Cannot measure quality on {settings.quality.data}: the model is calibrated on {sorted(one & other)[0]} too. Give a text of "
            "its own, or remove quality.data: a part of the calibration's text is held out then."
        )
    return files


def load_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the documents of files: a .jsonl has one a line, a string or an object with `text` or `prompt`; a .txt is cut into pieces."""
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig", newline="\n") as file:
                if path.suffix == ".txt":
                    yield from iter(lambda file=file: file.read(PIECE), "")  # type: ignore[misc]
                else:
                    yield from (_read_line(path, number, line) for number, line in enumerate(file, 1) if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read text {path}: {error}. Expected UTF-8.") from None


def _read_line(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
        text: Any = value.get("text", value.get("prompt")) if isinstance(value, dict) else value
        text.encode("utf-8")  # a lone surrogate is no text
    except (ValueError, RecursionError, AttributeError):
        raise ConfigError(f"Cannot read text {path}: line {number} is no JSON string, nor an object with `text`. Mend it.") from None
    return str(text)


def load_text(settings: QuantizeConfig, yaml_path: Path, tokenizer: Tokenizer, shape: ModelShape) -> Text:
    """Read and tokenize the text of a quantization. Of one text both to calibrate and to measure on, every HOLD_OUT-th sequence is kept."""
    files, calibration, quality = text_files(settings, yaml_path), settings.calibration, settings.quality
    length = min(shape.context, DEFAULT_LENGTH if calibration is None else calibration.max_length)
    wanted = {"calibration": 0 if calibration is None else calibration.samples, "quality": quality.samples}
    if "quality" in files and (quality.data is None or files["quality"] is files.get("calibration")):
        enough = max(wanted["quality"] * HOLD_OUT, wanted["calibration"] * HOLD_OUT // (HOLD_OUT - 1) + 1)
        sequences = _take(files["quality"], tokenizer, length, enough, shape.vocab, HOLD_OUT)
        rest = [sequence for index, sequence in enumerate(sequences, 1) if index % HOLD_OUT]
        text = Text(rest[: wanted["calibration"]], sequences[HOLD_OUT - 1 :: HOLD_OUT][: wanted["quality"]])
    else:
        taken = {use: _take(paths, tokenizer, length, wanted[use], shape.vocab, 1) for use, paths in files.items()}
        text = Text(taken.get("calibration", []), taken.get("quality", []))
    for use, found in (("calibration", text.calibration), ("quality", text.held_out)):
        if use in files and len(found) < wanted[use]:
            log(f"the text for {use} has only {len(found)} of {wanted[use]} sequences of up to {length} tokens")
    return text


def _take(files: Sequence[Path], tokenizer: Tokenizer, length: int, count: int, vocab: int, least: int) -> list[list[int]]:
    """Return the first `count` sequences of files; a document of more than `length` tokens is several."""
    sequences = list(islice(_encode(files, tokenizer, length), count))
    if len(sequences) < least:
        raise ConfigError(
            f"Cannot use text {files[0]}: it holds {len(sequences)} sequences of {SHORTEST} to {length} tokens, expected at least "
            f"{least}. Add text, or lower max_length."
        )
    if (largest := max(map(max, sequences))) >= vocab:
        raise ConfigError(
            f"Cannot use text {files[0]}: the tokenizer gives id {largest}, the model has {vocab} rows. Use the model's own tokenizer."
        )
    return sequences


def _encode(files: Sequence[Path], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    for text in load_texts(files):
        ids: list[int] = tokenizer.encode(text).ids
        for start in range(0, len(ids), length):
            if len(ids[start : start + length]) >= SHORTEST:
                yield ids[start : start + length]


def calibrate(
    source: TllmCheckpoint, scheme: QuantScheme, settings: QuantizeConfig, sequences: Sequence[Sequence[int]], scratch: Path, label: str
) -> Scales:
    """Return the scales of every linear layer, by its name in the whole model.

    One layer and the hidden states of all calibration tokens are in memory at a time. Scales are found on the activations of the
    unquantized model; GPTQ's on those of the layers quantized so far. GPTQ's integers are kept in the file `scratch`.
    """
    import torch

    from specbuild.decoder import Decoder

    decoder = Decoder(source)
    by_gptq = settings.rounding == "gptq"
    scales: dict[str, LinearScales] = {}
    writer = TensorWriter(scratch, plan_rounded(source.shape, settings.group_size)) if by_gptq else None
    with torch.no_grad(), bar(f"calibrate {label}", source.shape.layers, "layer") as progress:
        chunks = decoder.embed(sequences)
        for index in range(source.shape.layers):
            layer = decoder.layer(index)
            prefix = f"transformer.layers.{index}."
            if writer is not None:
                _round_layer(layer, chunks, settings.group_size, writer, prefix)
                chunks = [layer(chunk) for chunk in chunks]
            else:
                after = [layer(chunk) for chunk in chunks]
                scales |= _search_layer(layer, chunks, str(scheme.recipe), settings.group_size, prefix)
                chunks = after
            progress.update(1)
    if writer is not None:
        writer.close()
        return RoundedScales(scratch)
    return scales


def _search_layer(layer: DecoderLayer, chunks: Sequence[Chunk], recipe: str, group_size: int, prefix: str) -> dict[str, LinearScales]:
    """Find one layer's scales; q, k and v, one layer of the engine, share the mean of theirs, as NVIDIA's exporter has it."""
    import torch

    from specbuild.decoder import LINEARS
    from specbuild.quant.calibrate import find_scales

    def forward(module: torch.nn.Module) -> None:
        for chunk in chunks:
            module(chunk)

    found = find_scales(layer, forward, recipe, group_size)
    scales: dict[str, LinearScales] = {}
    for part in dict.fromkeys(LINEARS.values()):
        group = [found[name] for name in LINEARS if LINEARS[name] == part and name in found]
        if group:
            prequant = torch.stack([each.prequant for each in group]).mean(dim=0)
            scales[prefix + part] = LinearScales(prequant, group[0].activation)
    return scales


def _round_layer(layer: DecoderLayer, chunks: Sequence[Chunk], group_size: int, writer: TensorWriter, prefix: str) -> None:
    """Round one layer's weights by GPTQ, in place, and write the integers and scales under the engine's names."""

    from specbuild.decoder import LINEARS
    from specbuild.quant.gptq import round_gptq

    linears = layer.linears()
    grams = find_grams(layer, chunks)
    rows = dict.fromkeys(LINEARS.values(), 0)
    for name, module in linears.items():
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        q, scale = round_gptq(weight, grams[name], group_size)
        weight.copy_(Levels(q, scale, None, 4).weight())
        part = LINEARS[name]
        writer.write_rows(f"{prefix}{part}.q", rows[part], q.cpu())
        writer.write_rows(f"{prefix}{part}.scale", rows[part], scale.cpu())
        rows[part] += len(q)


def find_grams(layer: DecoderLayer, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
    """Return X.T @ X (in, in) of the inputs of each linear module, over all chunks; modules with the same input share it."""

    shared = {"k": "q", "v": "q", "gate": "fc"}
    linears = layer.linears()
    grams: dict[str, torch.Tensor] = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
            gram = inputs[0].T @ inputs[0]
            grams[name] = gram if name not in grams else grams[name].add_(gram)

        return linears[name].register_forward_pre_hook(add)

    handles = [watch(name) for name in linears if name not in shared]
    for chunk in chunks:
        layer(chunk)
    for handle in handles:
        handle.remove()
    return {name: grams[shared.get(name, name)] for name in linears}
