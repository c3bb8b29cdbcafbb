"""What quantizing the target, the draft or both does to the draft's acceptance, on held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.artifacts import TllmCheckpoint, find_model_dir
from specbuild.calibration import load_text
from specbuild.config import ROLES, PairConfig, Role
from specbuild.progress import bar, log
from specbuild.provenance import Record, digest_artifact, make_artifact
from specbuild.quality import LOGIT_ROWS
from specbuild.quant import QuantScheme, find_scheme
from specbuild.quantize import digest_text, legal_groups
from specbuild.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import torch

    from specbuild.decoder import Decoder

FILE = "acceptance.json"
BITS = (16, 8, 4)


@dataclass(frozen=True)
class Cell:
    """One way to store both models."""

    target: str
    draft: str
    greedy: float  # the share of positions where both have the same likeliest token: acceptance at temperature 0
    sampled: float  # the mean of sum_x min(target(x), draft(x)): acceptance by rejection at temperature 1 (Leviathan et al., 3.1)


@dataclass(frozen=True)
class AcceptanceReport:
    """Acceptance of the first drafted token at every position of a text, for every combination of precisions."""

    tokens: int
    cells: tuple[Cell, ...]


def run_acceptance(config: PairConfig, force: bool = False) -> AcceptanceReport | None:
    """Write `<workdir>/acceptance` and return its report; None where there is nothing to compare."""
    settings = config.target.quantize
    if not settings.quality.samples:
        return None
    stored = {role: TllmCheckpoint.open(config.dir_of(role, "checkpoint")) for role in ROLES}
    if any(checkpoint.config["quantization"]["quant_algo"] for checkpoint in stored.values()):
        log("acceptance not compared: a model came quantized, there is no full precision to compare with")
        return None
    inputs = {f"{role} {stage}": digest_artifact(config.dir_of(role, stage)) for role in ROLES for stage in ("checkpoint", "quantized")}
    inputs |= digest_text(config, "target")
    record = Record("acceptance", settings.quality.model_dump(), inputs, ("torch",))
    directory = config.work_dir / "acceptance"

    def make(out: Path) -> None:
        (out / FILE).write_text(json.dumps(asdict(measure_acceptance(config, stored)), indent=2) + "\n")

    make_artifact(directory, record, force, make)
    values = json.loads((directory / FILE).read_text(encoding="utf-8"))
    return AcceptanceReport(values["tokens"], tuple(Cell(**cell) for cell in values["cells"]))


def measure_acceptance(config: PairConfig, stored: dict[Role, TllmCheckpoint]) -> AcceptanceReport:
    """Run each model at each precision over the held-out text, then compare all pairs, some positions at a time."""
    import torch

    tokenizer = load_tokenizer(find_model_dir(config.target, config.path, weights=False))
    shapes = [stored[role].shape for role in ROLES]
    vocab, context = min(shape.vocab for shape in shapes), min(shape.context for shape in shapes)
    both = replace(shapes[0], vocab=vocab, max_positions=min(context, shapes[0].max_positions))
    sequences = load_text(config.target.quantize, config.path, tokenizer, both).held_out
    variants = {role: make_variants(config, role, stored[role]) for role in ROLES}
    total = sum(len(each) for each in variants.values())
    hidden: dict[Role, dict[str, torch.Tensor]] = {role: {} for role in ROLES}
    with torch.no_grad(), bar("measure acceptance", total, "model") as progress:
        for role in ROLES:
            for name, decoder in variants[role].items():
                hidden[role][name] = run_decoder(decoder, sequences)
                progress.update(1)
        sums = torch.zeros(len(hidden["target"]), len(hidden["draft"]), 2, dtype=torch.float64)
        tokens = sum(map(len, sequences))
        for start in range(0, tokens, LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            probs = {
                role: [decoder.logits(hidden[role][name][rows])[:, :vocab].softmax(-1) for name, decoder in variants[role].items()]
                for role in ROLES
            }
            for i, target in enumerate(probs["target"]):
                for j, draft in enumerate(probs["draft"]):
                    same = (target.argmax(-1) == draft.argmax(-1)).sum()
                    sums[i, j] += torch.stack([same, torch.minimum(target, draft).sum()]).cpu()
    names = [list(hidden[role]) for role in ROLES]
    cells = [Cell(t, d, *(sums[i, j] / tokens).tolist()) for i, t in enumerate(names[0]) for j, d in enumerate(names[1])]
    return AcceptanceReport(tokens, tuple(cells))


def run_decoder(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the hidden states after the last layer, (tokens, hidden)."""
    import torch

    chunks = decoder.embed(sequences)
    for index in range(decoder.shape.layers):
        layer = decoder.layer(index)
        chunks = [layer(chunk) for chunk in chunks]
    return torch.cat([chunk.hidden for chunk in chunks])


def make_variants(config: PairConfig, role: Role, stored: TllmCheckpoint) -> dict[str, Decoder]:
    """Return a model in full precision, 8 and 4 bits: as the YAML has it where it says so, else by rounding alone."""
    from specbuild.decoder import Decoder

    settings = config.model_of(role).quantize
    chosen = find_scheme(settings.scheme)
    variants = {}
    for bits in BITS:
        if bits == 16:
            variants[str(stored.config["dtype"])] = Decoder(stored)
        elif bits == chosen.bits:
            variants[f"{chosen.name} (as built)"] = Decoder(TllmCheckpoint.open(config.dir_of(role, "quantized")))
        else:
            scheme, group_size = _standard(bits, stored)
            variants[f"{scheme.name}, rounded"] = Decoder(stored, scheme, group_size)
    return variants


def _standard(bits: int, stored: TllmCheckpoint) -> tuple[QuantScheme, int]:
    """Return the scheme of a width that needs no calibration, and the widest group that the model's columns allow."""
    groups = legal_groups(stored.shape, 1)
    if bits == 4 and groups:
        return find_scheme("int4_awq"), groups[0]
    return find_scheme("int4_wo" if bits == 4 else "int8_wo"), 0


def format_acceptance(report: AcceptanceReport) -> str:
    """Return the report as a table: targets down, drafts across."""
    drafts = list(dict.fromkeys(cell.draft for cell in report.cells))
    lines = [
        f"acceptance of the draft's first token on {report.tokens} held-out tokens: greedy / sampled at temperature 1",
        f"  {'target':<24}" + "".join(f"draft {name:<24}" for name in drafts).rstrip(),
    ]
    for target in dict.fromkeys(cell.target for cell in report.cells):
        cells = [cell for cell in report.cells if cell.target == target]
        lines.append(f"  {target:<24}" + "".join(f"{f'{cell.greedy:.4f} / {cell.sampled:.4f}':<30}" for cell in cells).rstrip())
    return "\n".join(lines)
