"""Only what is known to be harmless stays, and that is what a bug report needs. No text takes long."""

from __future__ import annotations

import json
import time

import pytest

from paceline.tools.doctor.redact import Redactor
from samples import sample
from unit.tools.doctor import fake_secrets

STAYS = """\
  strategy       ddp          auto: 25 parameters × 8 bytes (weight 4 + gradient 4) = 0.0 MiB; each rank holds a replica
  micro_batch    4            batch 8 / (1 accumulation step × 2 data ranks), rounded up
pre-flight passed on 2 ranks
step 12000/20000  epoch 1  loss 0.2897  lr 3.0e-04  2.2k samples/s  data wait 6%  94.7kFLOP/s  293.2 MiB  ETA 0:01
step 120 | loss 2.3171 | grad_norm 0.81 | lr 3.0e-04 | 53211 tokens/s | 12.3 GiB
rank 1 failed first (log: runs/gpt/logs/rank-1.log): exception
rank 1 raised ValueError after training, step 4000
Traceback (most recent call last):
  File "train.py", line 1234, in main
[rank0]:   File "torch/nn/modules/module.py", line 1773, in _wrapped_call_impl
  at: train.py:12, in main
[config.unknown-key] unknown key 'batch'
  fix: did you mean 'batch'?
warning: [train.unused-parameters] parameter 'decoder.fc.weight' is unused on rank 1 at step 4711
RuntimeError: The size of tensor a (4096) must match the size of tensor b (8) at dimension 1
RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 512x6)
RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
size mismatch for layers.0.weight: copying a param with shape torch.Size([4096, 1024]) from checkpoint
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB.
[rank1]:[W1118 21:50:06.123456789 ProcessGroupNCCL.cpp:1234] Warning: destroy_process_group() was not called
ProcessGroupNCCL.cpp:3356, internal error - please report this issue to the NCCL developers, NCCL version 2.27.5
WorkNCCL(SeqNum=1234, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000)
ModuleNotFoundError: No module named 'torch'
the clock says 2026-11-18 22:03:11 UTC
torch 2.13.0+cpu, Python 3.11.7
/dev/shm: 23.5 GiB, 23.5 GiB free
"""

PARTLY = {
    "[rank0]: KeyError: 'zyx'": "[rank0]: KeyError: '<#1>'",
    "ValueError: PIN 4711 is wrong": "ValueError: PIN <#1>",
    "ValueError: bad passphrase open the model": "ValueError: bad passphrase <#1>",
    "ValueError: bad value 4711": "ValueError: bad value <#1>",
    "AttributeError: 'Zyx' object has no attribute 'qwv'": "AttributeError: '<#1>' object has no attribute '<#2>'",
    '  File "/home/zyx/train.py", line 12, in main': '  File "<#1>/train.py", line 12, in main',
    '  File "/home/zyx/qwv.py", line 12, in qwv': '  File "<#3>/<#2>.py", line 12, in <#1>',
    "/home/zyx/train.py:12: UserWarning: zyx was zyx": "<#1>/train.py:12: UserWarning: <#2> <#3> <#2>",
    "warning: see https://host/zyx?a=1 or http://localhost:6006/zyx": "warning: see https://<#1> or http://localhost",
    "RuntimeError: rank 3 has zyx, at step 12000": "RuntimeError: rank 3 has <#1>, at step 12000",
    "node-1:1234:1240 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>": (
        "node-1:1234:<#1> [0] NCCL INFO Bootstrap : Using eth0:<#2><0>"
    ),
}


@pytest.mark.parametrize("line", STAYS.splitlines())
def test_what_a_reader_needs_stays(line: str) -> None:
    assert Redactor().log(line) == line


@pytest.mark.parametrize("line", PARTLY)
def test_the_unknown_part_of_a_known_line_is_replaced(line: str) -> None:
    assert Redactor().log(line) == PARTLY[line]


def test_lines_of_the_program_are_left_out_and_counted() -> None:
    redactor = Redactor()
    assert redactor.log("step 1 | loss 2\nhello zyx\nthe PIN is 4711\r\nstep 2 | loss 1\n") == (
        "step 1 | loss 2\n[… 2 lines left out …]\nstep 2 | loss 1\n"
    )
    assert redactor.take_counts() == {"lines": 2}
    assert redactor.take_counts() == {}


def test_the_same_text_has_the_same_placeholder() -> None:
    redactor = Redactor()
    assert redactor.log("KeyError: 'zyx'\nKeyError: 'qwv'\nKeyError: 'zyx'").count("<#1>") == 2


def test_records_keep_known_names_with_numbers() -> None:
    record = {
        "step": 12000,
        "loss": 2.31,
        "time": 1795038923.9,
        "cause": "exception",
        "exit_code": 1,
        "resumed": False,
        "error": None,
        "code": "train.out-of-memory",
        "samples_per_second": 2151.89,
        "versions": {"torch": "2.13.0+cpu"},
        "layout": {"ranks": 2},
    }
    assert Redactor().values(record) == record


def test_nothing_remains_below_the_name_of_a_secret_or_an_unknown_name() -> None:
    values = {"password": {"name": "model"}, "pin": 4711, "zyx": "model 4711", "value": 4711, "data": {"card": 4711}}
    assert Redactor().values(values) == {
        "password": "<#1>",
        "pin": "<#2>",
        "<#3>": "<#4>",
        "value": "<#2>",
        "data": {"card": "<#2>"},
    }


def test_arguments_stay_by_their_option() -> None:
    args = [
        "train.py",
        "--lr",
        "3e-4",
        "--seed",
        "12345",
        "train.epochs=3",
        "--password",
        "model",
        "--zyx",
        "1",
        "--pin=4711",
        "qwv",
    ]
    assert Redactor().values({"args": args})["args"] == [
        "train.py",
        "--lr",
        "3e-4",
        "--seed",
        "12345",
        "train.epochs=3",
        "--password",
        "<#1>",
        "<#2>",
        "<#3>",
        "--pin=<#4>",
        "<#5>",
    ]


def test_settings_stay_by_their_name() -> None:
    text = "batch: 4096  # default\noptimizer:\n  name: adamw\n  lr: 0.1\n"
    text += "model:\n  zyx:\n    lr: 3\n  note: qwv\nenv: {ZYX: abc}\n"
    found = Redactor().settings(text)
    assert found.startswith(
        "batch: 4096  # default\noptimizer:\n  name: adamw\n  lr: 0.1\nmodel:\n  <#1>:\n  note: <#2>\n"
    )
    assert found.endswith("# 1 lines left out")
    assert "abc" not in found


@pytest.mark.parametrize("seed", range(sample(2, 5)))
def test_redacting_twice_changes_little(seed: int) -> None:
    for each in fake_secrets.every(seed):
        for text in fake_secrets.forms_of(each):
            once = Redactor().log(text)
            assert len(Redactor().log(once)) <= len(once) + 40


FRAGMENTS = [
    "a",
    "token",
    "token=",
    "token=a ",
    "password: ",
    "password: a\n",
    "a=b\n",
    "\n",
    " ",
    '"',
    "'",
    "\\",
    "a:",
    "a:b@c ",
    "://",
    "https://u:p@h ",
    "-",
    "--token ",
    "<a",
    "{",
    "1 ",
    "1-",
    "12",
    "1.",
    "1e",
    "/",
    "/a",
    "~",
    "a.",
    "A",
    "Aa",
    "\x1b[",
    "x=>",
    'File "',
    "at: ",
    "[rank0]: ",
    "Error: ",
    "rank 1 ",
    "2026-01-01",
    "a" * 30 + "\n",
    "a.b-c_d ",
    "\r",
    "12345678:",
    "- ",
    "a: b\n",
    " a: #",
    "x/1",
    "_",
    "NCCL ",
    "[W1118 ",
]


def test_known_letters_inside_of_an_unknown_word_are_hidden() -> None:
    for before in ("bad value ", "no such file: '/data/", "/tmp/"):
        assert "imE" not in Redactor().log(f"ValueError: {before}oIy$,imE!;vpD%/x given")


@pytest.mark.parametrize("fragment", FRAGMENTS[:: sample(4, 1)], ids=repr)
def test_the_time_grows_with_the_text_only(fragment: str) -> None:
    """With quadratic time, this would take minutes."""
    text = fragment * (300_000 // len(fragment))
    start = time.process_time()
    redactor = Redactor()
    redactor.log(text)
    redactor.settings(text)
    redactor.values({"text": text, text: "a"})
    assert time.process_time() - start < 20


def test_json_that_was_parsed_hides_nothing() -> None:
    secret = "h" + "f_" + fake_secrets.made_up(34)
    escaped = '{"text": "' + "".join(f"\\u{ord(letter):04x}" for letter in f"ValueError: {secret}") + '"}'
    assert secret not in json.dumps(Redactor().values(json.loads(escaped)))
