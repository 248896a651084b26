"""Reading prompts in verl's layout, and splitting them."""

import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from forerun.data.prompts import Prompt, read_prompts, split_prompts
from forerun.errors import UsageError

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 1},
    },
]


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert prompts == read_prompts(tmp_path / "p.parquet")
    assert [prompt.place for prompt in prompts] == [f"{tmp_path / 'p.jsonl'}, line {line}" for line in (1, 3)]
    assert prompts[1] == Prompt(ROWS[1]["prompt"], "3", "openai/gsm8k", {"split": "train", "index": 1})


def test_what_is_optional(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "x", "reward_model": {"ground_truth": 4}}\n')
    first, second = read_prompts(tmp_path / "mine.jsonl")
    assert first == Prompt([{"role": "user", "content": "hello"}], None, "mine", {})
    assert second.ground_truth == 4


def test_a_json_file_may_be_one_list(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps([*ROWS, {"question": "x"}], indent=1))
    with pytest.raises(UsageError, match=r"p\.json: 1 of 3 rows cannot be used: item 3: no column 'prompt'"):
        read_prompts(tmp_path / "p.json")
    prompts = read_prompts(tmp_path / "p.json", "skip")
    assert [(prompt.ground_truth, prompt.place[-6:]) for prompt in prompts] == [("2", "item 1"), ("3", "item 2")]
    (tmp_path / "p.json").write_text("[{}")
    with pytest.raises(UsageError, match=r"p\.json: not JSON \("):
        read_prompts(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps(ROWS[0]))
    assert read_prompts(tmp_path / "p.json") == prompts[:1]  # an object a line


def test_the_ground_truth_may_be_a_column(tmp_path):
    rows = [{"answer": "1"}, {"solution": "2"}, {"ground_truth": 3, "answer": "no"}, {"answer": None}]
    rows.append({"answer": "no", "reward_model": {"ground_truth": "5"}})
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": "x"} | row) for row in rows))
    assert [prompt.ground_truth for prompt in read_prompts(tmp_path / "p.jsonl")] == ["1", "2", 3, None, "5"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"question": "x"}', "no column 'prompt' among 'question'"),
        ('{"prompt": []}', "must be a list of chat messages"),
        ('{"prompt": [{"role": "user"}]}', "needs the strings 'role' and 'content'"),
        ('{"prompt": "x", "extra_info": 3}', "'extra_info' must be an object"),
        ('{"prompt": "\\ud800', "not JSON"),
        ('{"prompt": "half a pair \\ud800"}', "half a surrogate pair is no text"),
    ],
)
def test_a_bad_row_is_named_or_skipped(tmp_path, line, reason):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n" + json.dumps(ROWS[1]) + "\n")
    with pytest.raises(UsageError, match=r"p\.jsonl: 1 of 3 rows cannot be used: line 2: ") as error:
        read_prompts(path)
    assert reason in str(error.value) and "\n" not in str(error.value)
    reports: list[str] = []
    assert len(read_prompts(path, "skip", reports.append)) == 2
    assert len(reports) == 1 and reason in reports[0]


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "p.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match=r"cannot read \.csv"):
        read_prompts(tmp_path / "p.csv")
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="is empty: it has no rows"):
        read_prompts(tmp_path / "p.jsonl")
    (tmp_path / "q.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"1 of 1 rows cannot be used: line 1: no column 'prompt'"):
        read_prompts(tmp_path / "q.jsonl", "skip")
    (tmp_path / "p.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UsageError, match="not a readable parquet file"):
        read_prompts(tmp_path / "p.parquet")


def test_nested_columns_arrive_as_they_are(tmp_path):
    """Structs within structs, lists in them, nulls where other rows have keys; unknown columns are left alone."""
    rows = [
        {
            "prompt": [{"role": "user", "content": "1+1?", "name": None}],
            "reward_model": {"style": "rule", "ground_truth": ["2", "two"]},
            "extra_info": {"index": 1, "interaction": {"tools": [{"name": "calc"}], "limit": 0.5}},
            "embedding": [0.5, 0.25],
        },
        {"prompt": [{"role": "user", "content": "hm?"}], "reward_model": None, "extra_info": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    first, second = read_prompts(tmp_path / "p.parquet")
    assert first.messages == [{"role": "user", "content": "1+1?"}]
    assert first.ground_truth == ["2", "two"]
    assert first.extra_info == {"index": 1, "interaction": {"tools": [{"name": "calc"}], "limit": 0.5}}
    assert second == Prompt([{"role": "user", "content": "hm?"}], None, "p", {})


def test_a_bad_row_of_a_parquet_file_is_named_or_skipped(tmp_path):
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[0], ROWS[1] | {"prompt": None}, ROWS[1]]), path)
    with pytest.raises(UsageError, match=r"p\.parquet: 1 of 3 rows .*: row 2: column 'prompt' must be a list of chat"):
        read_prompts(path)
    reports: list[str] = []
    assert [prompt.ground_truth for prompt in read_prompts(path, "skip", reports.append)] == ["2", "3"]
    assert len(reports) == 1 and "row 2" in reports[0]


def test_a_data_set_by_its_name(tmp_path, monkeypatch):
    """A directory is a data set to `datasets.load_dataset` as one of the Hub is."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), folder / "test.parquet")
    prompts = read_prompts(f"hub:{folder}")
    assert prompts == read_prompts(folder / "train.parquet") == read_prompts(f"hub:{folder}:default:train")
    assert read_prompts(f"hub:{folder}:test") == read_prompts(f"hub:{folder}:train[:1]") == prompts[:1]
    with pytest.raises(UsageError, match=r"hub:.*:valid cannot be loaded \(ValueError: Unknown split") as error:
        read_prompts(f"hub:{folder}:valid")
    assert "\n" not in str(error.value)
    for name in ("hub:", "hub:a::train", "hub:a:b:c:d"):
        with pytest.raises(UsageError, match="is no data set: write hub:NAME"):
            read_prompts(name)


def test_a_data_set_that_cannot_be_had_is_one_line():
    """In a process that is told at its start that there is no network."""
    script = "from forerun.data.prompts import read_prompts; read_prompts('hub:no-such-owner/no-such-data')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    last = done.stderr.splitlines()[-1]
    assert "UsageError: hub:no-such-owner/no-such-data cannot be loaded (" in last
    assert last.endswith("check the name and the connection, or give a local .parquet file")


def test_split_is_disjoint_complete_and_repeatable():
    prompts = [Prompt([{"role": "user", "content": str(i % 20)}], None, "s") for i in range(30)]
    train, held_out = split_prompts(prompts, 5, seed=1)
    assert (train, held_out) == split_prompts(prompts, 5, seed=1)
    assert held_out != split_prompts(prompts, 5, seed=2)[1]
    texts = [{p.messages[0]["content"] for p in side} for side in (train, held_out)]
    assert not texts[0] & texts[1] and len(texts[1]) == 5
    assert len(train) + len(held_out) == 30
    with pytest.raises(UsageError, match="cannot hold out 20 of 20"):
        split_prompts(prompts, 20)
