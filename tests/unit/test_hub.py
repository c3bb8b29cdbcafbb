"""Hub ids go through the hub's cache, also without a network."""

import fnmatch
import json
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


# --- only the files that the model is loaded from are fetched

FILES = {
    "whole": ({"model.safetensors"}, {"model.safetensors"}),
    "whole beside others": ({"model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "x.gguf"}, {"model.safetensors"}),
    "shards": ({"model.safetensors.index.json", "a.safetensors", "b.safetensors", "c.safetensors"}, {"a.safetensors", "b.safetensors"}),
    ".bin": ({"pytorch_model.bin", "training_args.bin"}, {"pytorch_model.bin"}),
    ".bin shards": ({"pytorch_model.bin.index.json", "a.bin", "b.bin", "optimizer.bin"}, {"a.bin", "b.bin"}),
    "both kinds of shards": (
        {"model.safetensors.index.json", "pytorch_model.bin.index.json", "a.safetensors", "b.safetensors", "a.bin", "b.bin"},
        {"a.safetensors", "b.safetensors"},
    ),
}  # fmt: skip


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """Return make(files): a hub whose repository has these files and small ones; the list of what was fetched, in order."""

    def make(names):
        ending = "bin" if not any(name.endswith("safetensors") for name in names) else "safetensors"
        snapshot, fetched = tmp_path / COMMIT, []
        snapshot.mkdir()

        def snapshot_download(repository, revision, allow_patterns):
            assert repository == "org/tiny"
            assert revision in (None, COMMIT)
            for name in sorted({*names, "config.json", "tokenizer.json", "README.md"}):
                if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns) and not (snapshot / name).exists():
                    kind = "bin" if "bin.index" in name else ending
                    (snapshot / name).write_text(json.dumps({"weight_map": {"x": f"a.{kind}", "y": f"b.{kind}"}}))
                    fetched.append(name)
            return str(snapshot)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return fetched

    return make


@pytest.mark.parametrize(("names", "needed"), FILES.values(), ids=FILES)
def test_only_the_weight_files_of_the_model_are_fetched_after_the_small_files(fake_hub, tmp_path, names, needed):
    fetched = fake_hub(names)
    find_model_dir(ModelConfig(model="org/tiny"), tmp_path / "pair.yaml", weights=True)
    small = {name for name in names if name.endswith(".json")} | {"config.json", "tokenizer.json"}
    assert set(fetched[: len(small)]) == small
    assert set(fetched[len(small) :]) == needed


def test_check_fetches_no_weights(fake_hub, tmp_path):
    fetched = fake_hub({"model.safetensors"})
    find_model_dir(ModelConfig(model="org/tiny"), tmp_path / "pair.yaml", weights=False)
    assert set(fetched) == {"config.json", "tokenizer.json"}
