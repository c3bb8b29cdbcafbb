"""SCHEMES: the quantization schemes, by upstream's qformat name; one file and one row each."""

from specbuild.errors import CheckpointError, ConfigError
from specbuild.quant.full_prec import FULL_PREC
from specbuild.quant.int4_awq import INT4_AWQ
from specbuild.quant.int8_sq import INT8_SQ
from specbuild.quant.scales import LinearScales, RoundedScales, Scales, check_scales, load_scales, plan_rounded
from specbuild.quant.scheme import Levels, QuantScheme
from specbuild.quant.weight_only import INT4_WO, INT8_WO

SCHEMES: dict[str, QuantScheme] = {scheme.name: scheme for scheme in (FULL_PREC, INT8_WO, INT4_WO, INT4_AWQ, INT8_SQ)}

__all__ = ["SCHEMES", "Levels", "LinearScales", "QuantScheme", "RoundedScales", "Scales", "check_scales", "find_scheme", "load_scales",
           "plan_rounded", "scheme_of_algo"]  # fmt: skip


def find_scheme(name: str) -> QuantScheme:
    """Return a scheme by name; raise ConfigError with the list."""
    if name not in SCHEMES:
        raise ConfigError(f"Cannot quantize with scheme {name!r}: expected one of {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def scheme_of_algo(quant_algo: str | None) -> QuantScheme:
    """Return the scheme that a checkpoint's quant_algo names."""
    for scheme in SCHEMES.values():
        if scheme.quant_algo == quant_algo:
            return scheme
    raise CheckpointError(
        f"Cannot read quant_algo {quant_algo!r}: expected one of {', '.join(str(s.quant_algo) for s in SCHEMES.values())}."
    )
