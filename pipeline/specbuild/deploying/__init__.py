"""TARGETS: what `specbuild deploy --to` writes; one module and one row each, from a Deployment to named YAML documents."""

from __future__ import annotations

from specbuild.deploying import compose, kubernetes
from specbuild.deploying.deployment import Target

TARGETS: dict[str, Target] = {
    "compose": Target(compose.make_files, compose.describe_steps),
    "kubernetes": Target(kubernetes.make_files, kubernetes.describe_steps),
}
