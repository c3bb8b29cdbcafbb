"""Hub ids go through the hub's cache, also without a network."""

import shutil

import pytest

from specbuild.artifacts import find_model_dir
from specbuild.config import ModelConfig, load_config
from specbuild.convert import run_convert
from specbuild.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(make_model, tmp_path, monkeypatch):
    """A cache that holds org/tiny at one commit, as huggingface_hub lays it out."""
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(make_model("llama", num_hidden_layers=1), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository / "snapshots" / COMMIT


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_id_is_found_offline(cached, tmp_path, revision):
    model = ModelConfig(model="org/tiny", revision=revision)
    assert find_model_dir(model, tmp_path / "pair.yaml", weights=True).samefile(cached)


def test_a_cached_id_converts(cached, tmp_path, write_pair_yaml):
    config = load_config(write_pair_yaml(tmp_path, draft={"model": "org/tiny"}))
    assert run_convert(config, "draft")
    assert (config.dir_of("draft", "checkpoint") / "rank0.safetensors").exists()


@pytest.mark.parametrize(("name", "revision"), [("org/absent", None), ("org/tiny", "v2"), ("absent", None)])
def test_what_is_not_cached_is_one_line_that_names_both_readings(cached, tmp_path, name, revision):
    with pytest.raises(ConfigError, match=rf"Cannot find model {name}: .*not a directory.*hub.*fetch it once online"):
        find_model_dir(ModelConfig(model=name, revision=revision), tmp_path / "pair.yaml", weights=True)


def test_a_directory_of_that_name_beside_the_yaml_wins(cached, tmp_path):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert find_model_dir(ModelConfig(model="org/tiny"), tmp_path / "pair.yaml", weights=True) == tmp_path / "org" / "tiny"
