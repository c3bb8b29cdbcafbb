"""specbuild: speculative decoding deployments for Triton, from Hugging Face checkpoints."""

__version__ = "0.1.0"
