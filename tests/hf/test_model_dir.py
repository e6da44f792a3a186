"""Model directories: a missing file is named, and what is written loads in other libraries."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import HEADS
from tests.optimizer_moments import FIRST, SECOND, write_adamw_state

INDEX = "model.safetensors.index.json"


def test_a_path_that_is_no_directory_says_what_is_wanted(tmp_path):
    with pytest.raises(UserError, match=r"is not a directory.*hub name"):
        model_dir.resolve(str(tmp_path / "nothing"))


def test_a_directory_without_config_or_without_weights_is_named(tmp_path, tiny_model_dir):
    with pytest.raises(UserError, match=r"has no config\.json"):
        model_dir.resolve(str(tmp_path))
    shutil.copy(tiny_model_dir / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"has no \*\.safetensors weights"):
        model_dir.resolve(str(tmp_path))


def test_a_directory_of_adapters_is_no_model_and_says_how_to_make_one(tmp_path, tiny_model_dir):
    shutil.copy(tiny_model_dir / "config.json", tmp_path)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).touch()
    with pytest.raises(UserError, match=rf"contains adapters .* `python -m areal_x\.export {tmp_path} DIRECTORY`"):
        model_dir.resolve(str(tmp_path))


def test_a_function_makes_the_directory(tiny_model_dir):
    assert model_dir.resolve(lambda: str(tiny_model_dir)) == tiny_model_dir


def test_a_shard_that_the_index_names_and_is_not_there_is_listed(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-2\.safetensors"):
        list(model_dir.read_tensors(tmp_path))


def test_shards_are_read_as_one_model(tmp_path):
    tensors = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    for i, (name, x) in enumerate(tensors.items()):
        save_file({name: x}, tmp_path / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, name in enumerate(tensors)}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    for name, x in model_dir.read_tensors(tmp_path):
        np.testing.assert_array_equal(x, tensors.pop(name))
    assert not tensors


def test_a_written_model_loads_in_transformers_with_its_tokenizer(tmp_path, tiny_model_dir):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    doubled = {name: 2 * x for name, x in model_dir.read_tensors(tiny_model_dir)}
    model_dir.write_model(tmp_path / "out", tiny_model_dir, doubled.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, x in model.state_dict().items():
        np.testing.assert_array_equal(x.numpy(), doubled[name])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").decode([3, 4]) == "12"


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_model_that_judges_is_written_as_a_classifier_with_one_label(tmp_path, tied_model_dir, head):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    tensors = {**dict(model_dir.read_tensors(tied_model_dir)), "score.weight": np.arange(64, dtype=np.float32)[None]}
    model_dir.write_model(tmp_path / "out", tied_model_dir, tensors.items(), head=head)
    before, after = model_dir.read_config(tied_model_dir), model_dir.read_config(tmp_path / "out")
    assert after["architectures"] == ["Qwen3ForSequenceClassification"]
    assert after["num_labels"] == len(after["id2label"]) == len(after["label2id"]) == 1
    assert {name: after[name] for name in before if name != "architectures"} == {
        name: x for name, x in before.items() if name != "architectures"
    }
    model, found = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values())
    for name, x in model.state_dict().items():
        np.testing.assert_array_equal(x.numpy(), tensors[name])


def test_a_classifier_written_again_in_its_place_stays_one(tmp_path, tiny_model_dir):
    tensors = dict(model_dir.read_tensors(tiny_model_dir))
    model_dir.write_model(tmp_path, tiny_model_dir, tensors.items(), head="value")
    once = model_dir.read_config(tmp_path)
    model_dir.write_model(tmp_path, tmp_path, tensors.items(), head="reward")
    assert model_dir.read_config(tmp_path) == once


def test_a_classifier_is_a_critic_or_a_reward_model_and_no_policy(tmp_path, tiny_model_dir):
    model_dir.write_model(tmp_path, tiny_model_dir, [("a", np.ones(1))], head="value")
    model_dir.check_head(tmp_path, "value")
    model_dir.check_head(tmp_path, "reward")
    with pytest.raises(UserError, match=r"is a Qwen3ForSequenceClassification, .* a policy needs a causal language model"):
        model_dir.check_head(tmp_path, "policy")
    for head in HEADS:
        model_dir.check_head(tiny_model_dir, head)


@pytest.mark.parametrize("labels, count", [({}, 2), ({"num_labels": 5}, 5), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3)])
def test_a_classifier_of_several_labels_is_refused(tmp_path, labels, count):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"], **labels}))
    with pytest.raises(UserError, match=rf"with {count} labels: the head 'reward' needs a classifier with one"):
        model_dir.check_head(tmp_path, "reward")


def test_moments_and_numbers_come_back_as_they_were(tmp_path):
    first, second = np.arange(4, dtype=np.float32), np.ones((2, 3), np.float32)
    write_adamw_state(tmp_path, [("w", first, second)], {"version": 7})
    back = dict(model_dir.read_moments(tmp_path))
    np.testing.assert_array_equal(back["exp_avg.w"], first)
    np.testing.assert_array_equal(back["exp_avg_sq.w"], second)
    assert model_dir.read_trainer_state(tmp_path) == {"version": 7}


def test_what_is_larger_than_a_file_may_be_is_written_in_several_and_read_as_one(tmp_path, tiny_model_dir, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    tensors = dict(model_dir.read_tensors(tiny_model_dir))
    monkeypatch.setattr(model_dir, "FILE_BYTES", 64 * 2**10)
    model_dir.write_model(tmp_path, tiny_model_dir, tensors.items())
    write_adamw_state(tmp_path, [(name, x, 2 * x) for name, x in tensors.items()], {"version": 1})
    files = [f.name for f in model_dir.tensor_files(tmp_path)]
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert max((tmp_path / name).stat().st_size for name in files) < 70 * 2**10
    assert list(dict(model_dir.read_tensors(tmp_path))) == list(tensors)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, x in model.state_dict().items():
        np.testing.assert_array_equal(x.numpy(), tensors[name])
    moments = dict(model_dir.read_moments(tmp_path))
    for name, x in tensors.items():
        np.testing.assert_array_equal(moments[FIRST + name], x)
        np.testing.assert_array_equal(moments[SECOND + name], 2 * x)
    monkeypatch.undo()
    model_dir.write_model(tmp_path, tiny_model_dir, tensors.items())
    assert [f.name for f in model_dir.tensor_files(tmp_path)] == [model_dir.WEIGHTS]


def test_the_index_names_the_weights_and_not_the_moments_beside_them(tmp_path, tiny_model_dir):
    tensors = dict(model_dir.read_tensors(tiny_model_dir))
    model_dir.write_model(tmp_path, tiny_model_dir, tensors.items())
    write_adamw_state(tmp_path, [(name, x, x) for name, x in tensors.items()], {"version": 1})
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == dict.fromkeys(tensors, model_dir.WEIGHTS)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())


def test_moments_that_are_missing_are_not_looked_for_among_the_weights(tiny_model_dir):
    with pytest.raises(FileNotFoundError, match=r"optimizer\.safetensors"):
        list(model_dir.read_moments(tiny_model_dir))
