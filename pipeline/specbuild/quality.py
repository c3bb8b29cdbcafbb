"""What quantization did to a model, measured on held-out text: perplexity, KL divergence, likeliest tokens, error of every layer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.artifacts import TllmCheckpoint
from specbuild.config import QuantizeConfig
from specbuild.errors import CheckpointError
from specbuild.progress import bar, log

if TYPE_CHECKING:
    import torch

    from specbuild.decoder import Chunk, Decoder, DecoderLayer

FILE, PICTURE = "quality.json", "quality.png"
WARN_KL, WARN_TOP1 = 0.1, 0.9  # beyond these a quantized model is named as doubtful, where the YAML sets no limits
WORST = 5  # layers named in the table
LARGEST = 700.0  # nats per token; e to this is the last that JSON can carry as a number
LOGIT_ROWS = 256  # positions whose logits are in memory at once


@dataclass(frozen=True)
class LayerError:
    """The error of one linear layer alone, on the inputs of the unquantized model: |Wq x - W x| / |W x|, over all tokens."""

    layer: int
    part: str
    error: float


@dataclass(frozen=True)
class QualityReport:
    """A quantized model beside the one it was made from. KL is of the quantized from the unquantized distribution, nats per token."""

    scheme: str
    tokens: int
    perplexity_before: float
    perplexity_after: float
    kl: float
    top1: float  # the share of positions whose likeliest token stays
    layers: tuple[LayerError, ...]

    @property
    def worst(self) -> list[LayerError]:
        return sorted(self.layers, key=lambda each: -each.error)[:WORST]


def measure_quality(before: Decoder, after: Decoder, sequences: Sequence[Sequence[int]], scheme: str, label: str) -> QualityReport:
    """Run both models over the same sequences, layer by layer."""
    import torch

    layers: list[LayerError] = []
    with torch.no_grad(), bar(f"measure {label}", before.shape.layers, "layer") as progress:
        plain, quantized = before.embed(sequences), after.embed(sequences)
        for index in range(before.shape.layers):
            one, other = before.layer(index), after.layer(index)
            with LayerWatch(one, other) as errors:
                plain = [one(chunk) for chunk in plain]
            layers += [LayerError(index, part, error) for part, error in errors.relative().items()]
            quantized = [other(chunk) for chunk in quantized]
            progress.update(1)
        sums = _compare_logits(before, after, plain, quantized, sequences)
    tokens = sum(map(len, sequences))
    predicted = tokens - len(sequences)
    before_nll, after_nll, kl, same = (float(value) for value in sums)
    perplexities = [math.exp(min(nll / predicted, LARGEST)) for nll in (before_nll, after_nll)]
    return QualityReport(scheme, tokens, perplexities[0], perplexities[1], kl / tokens, same / tokens, tuple(layers))


class LayerWatch:
    """While open, compares every linear module of a layer with its quantized twin, on the inputs that it gets."""

    def __init__(self, layer: DecoderLayer, other: DecoderLayer) -> None:
        from specbuild.decoder import LINEARS

        self._parts = LINEARS
        self._sums: dict[str, tuple[float, float]] = {}
        self._pairs = {name: (module, other.linears()[name]) for name, module in layer.linears().items()}

    def __enter__(self) -> LayerWatch:
        self._handles = [module.register_forward_hook(self._hook(name, twin)) for name, (module, twin) in self._pairs.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, twin: torch.nn.Module):  # type: ignore[no-untyped-def]  # noqa: ANN202  torch's hooks have no type
        import torch

        def compare(_: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            error, size = self._sums.get(self._parts[name], (0.0, 0.0))
            difference = torch.linalg.vector_norm(twin(inputs[0]) - output).item() ** 2
            self._sums[self._parts[name]] = (error + difference, size + torch.linalg.vector_norm(output).item() ** 2)

        return compare

    def relative(self) -> dict[str, float]:
        """Return the relative error of each linear layer, by the engine's name."""
        return {part: (error / size) ** 0.5 if size else 0.0 for part, (error, size) in self._sums.items()}


def _compare_logits(
    before: Decoder, after: Decoder, plain: Sequence[Chunk], quantized: Sequence[Chunk], sequences: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return sums over all tokens: negative log likelihood before and after, KL, and how many likeliest tokens stay."""
    import torch

    sums = torch.zeros(4, dtype=torch.float64)
    following = iter(sequences)
    for one, other in zip(plain, quantized, strict=True):
        # The last token of a sequence predicts none: -1.
        targets = torch.tensor([token for sequence in take(following, len(one.lengths)) for token in (*sequence[1:], -1)])
        for start in range(0, len(targets), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            logs = [model.logits(chunk.hidden[rows]).log_softmax(-1).cpu() for model, chunk in ((before, one), (after, other))]
            wanted = targets[rows]
            known = wanted >= 0
            likelihoods = [-log[known].gather(1, wanted[known][:, None]).sum() for log in logs]
            kl = (logs[0].exp() * (logs[0] - logs[1])).sum()
            sums += torch.stack([*likelihoods, kl, (logs[0].argmax(-1) == logs[1].argmax(-1)).sum()])
    return sums


def take(sequences: Iterator[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Return the next `count` sequences."""
    return [next(sequences) for _ in range(count)]


def write_quality(
    source: TllmCheckpoint, quantized: TllmCheckpoint, settings: QuantizeConfig, sequences: Sequence[Sequence[int]], label: str
) -> QualityReport:
    """Measure a quantized checkpoint and write quality.json and quality.png beside it; raise CheckpointError when a limit is missed."""
    from specbuild.decoder import Decoder

    report = measure_quality(Decoder(source), Decoder(quantized), sequences, settings.scheme, label)
    (quantized.directory / FILE).write_text(json.dumps(asdict(report), indent=2) + "\n")
    if find_spec("matplotlib") is None:
        log(f"{PICTURE} not drawn: matplotlib is not installed (`pip install 'specbuild[calibrate]'`)")
    else:
        draw_quality(report, quantized.directory / PICTURE, label)
    try:
        check_limits(report, settings, label)
    except CheckpointError:
        log(format_quality(report, label))
        raise
    log(summarize_quality(report, label))
    return report


def summarize_quality(report: QualityReport, label: str) -> str:
    """Return the report as one line."""
    return (
        f"{label}: perplexity {report.perplexity_before:.4g} to {report.perplexity_after:.4g}, KL {report.kl:.5f} nats per token, top-1 "
        f"agreement {report.top1:.4f} on {report.tokens} held-out tokens"
    )


def load_quality(directory: Path) -> QualityReport | None:
    """Read the report of a quantized checkpoint; None where nothing was measured."""
    if not (directory / FILE).exists():
        return None
    values = json.loads((directory / FILE).read_text(encoding="utf-8"))
    return QualityReport(**{**values, "layers": tuple(LayerError(**each) for each in values["layers"])})


def check_limits(report: QualityReport, settings: QuantizeConfig, label: str) -> None:
    """Raise CheckpointError when a limit of the YAML is missed; warn where there is none and much was lost."""
    check_missed(report, settings, label)
    doubtful = []
    if settings.quality.max_kl is None and not report.kl <= WARN_KL:
        doubtful.append(f"KL is {report.kl:.4f} nats per token (doubtful beyond {WARN_KL})")
    if settings.quality.min_top1 is None and not report.top1 >= WARN_TOP1:
        doubtful.append(f"top-1 agreement is {report.top1:.4f} (doubtful below {WARN_TOP1})")
    if doubtful:
        log(f"warning: the quantized {label} lost much: {' and '.join(doubtful)} ({_name_worst(report)}). {suggest(settings)}")


def check_missed(report: QualityReport, settings: QuantizeConfig, label: str) -> None:
    """Raise CheckpointError when a limit of the YAML is missed."""
    limits, missed = settings.quality, []
    if limits.max_kl is not None and not report.kl <= limits.max_kl:
        missed.append(f"KL is {report.kl:.4f} nats per token, expected at most {limits.max_kl:g}")
    if limits.min_top1 is not None and not report.top1 >= limits.min_top1:
        missed.append(f"top-1 agreement is {report.top1:.4f}, expected at least {limits.min_top1:g}")
    if missed:
        raise CheckpointError(f"Cannot accept the quantized {label}: {' and '.join(missed)} ({_name_worst(report)}). {suggest(settings)}")


def _name_worst(report: QualityReport) -> str:
    worst = report.worst[0]
    return f"worst: layer {worst.layer} {worst.part}, relative error {worst.error:.3f}"


def suggest(settings: QuantizeConfig) -> str:
    """Name the next better way to quantize."""
    if settings.scheme == "full_prec":
        return "Nothing is quantized: is the dtype right?"
    if settings.scheme != "int4_awq":
        better = {"int4_wo": "int4_awq with calibration", "int8_wo": "full_prec"}
        return f"Use scheme {better.get(settings.scheme, 'int8_wo, or full_prec')}."
    smaller = "group_size 64, " if settings.group_size > 64 else ""
    if settings.calibration is None:
        return f"Add calibration: {{data: builtin}}, best with rounding: gptq; or use {smaller}or int8_wo."
    other = "more calibration samples of your own text" if settings.rounding == "gptq" else "rounding: gptq"
    return f"Use {other}, {smaller}or int8_wo."


def format_quality(report: QualityReport, label: str) -> str:
    """Return the report as a table."""
    change = report.perplexity_after / report.perplexity_before - 1
    lines = [
        f"quality of the {label}, {report.scheme}, on {report.tokens} held-out tokens",
        f"  perplexity       {report.perplexity_before:.4g} before, {report.perplexity_after:.4g} after ({change:+.2%})",
        f"  KL divergence    {report.kl:.5f} nats per token",
        f"  top-1 agreement  {report.top1:.4f}",
        "  worst layers     relative error of their output",
        *(f"    {each.layer:>3} {each.part:<16} {each.error:.4f}" for each in report.worst),
    ]
    return "\n".join(lines)


def draw_quality(report: QualityReport, path: Path, label: str) -> None:
    """Draw the relative error of every linear layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for part, marker in zip(dict.fromkeys(each.part for each in report.layers), "osD^v", strict=False):
        chosen = [each for each in report.layers if each.part == part]
        axes.plot([each.layer for each in chosen], [each.error for each in chosen], marker=marker, markersize=4, label=part)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of the output")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{label}, {report.scheme}: KL {report.kl:.4f} nats per token, top-1 agreement {report.top1:.3f}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=3)
    figure.savefig(path, dpi=120)
