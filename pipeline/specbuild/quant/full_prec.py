"""full_prec: weights in the checkpoint's dtype."""

from specbuild.quant.scheme import QuantScheme, default_settings, keep_spec, keep_weight

FULL_PREC = QuantScheme("full_prec", None, 16, False, keep_spec, keep_weight, lambda _: None, default_settings)
