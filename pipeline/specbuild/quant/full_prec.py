"""full_prec: weights in the checkpoint's dtype."""

from specbuild.quant.scheme import QuantScheme, keep_spec, keep_weight, no_settings

FULL_PREC = QuantScheme("full_prec", None, 16, False, keep_spec, keep_weight, lambda _: None, no_settings)
