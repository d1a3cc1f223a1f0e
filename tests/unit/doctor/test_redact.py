"""What looks like a secret is removed; what a bug report needs stays. No text takes long."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable

import pytest
import yaml

from paceline.doctor.redact import REMOVED, redact, redact_values
from unit.doctor import fake_secrets
from unit.doctor.fake_secrets import EVERY, Planted

NAMES = [
    "token", "secret", "password", "passwd", "pwd", "api_key", "apikey", "access_key", "private_key", "credential",
    "auth", "session", "cookie", "signature", "license_key", "HF_TOKEN", "dbPassword", "clientSecret", "X-Api-Key",
    "OPENAI_KEY", "my.service.token", "session_id", "GITHUB_TOKEN_2", "AccountKey", "PGPASSWORD", "MYSQL_PWD",
    "SLURM_JWT", "SMTP_PASS",
]  # fmt: skip
VALUES = [
    "qzxwvbnmk", "981274651", "p@s$,w0qz;rdx!", "qzab'cdxw", 'qzab"cdxw', "qza/b+xwc==", "qzäxwö-ñ", "qza\\bxw\\nyz9",
    "correct qzhorse battery",
]  # fmt: skip
FORMS: dict[str, Callable[[str, str], str]] = {
    "shell": lambda name, value: f"export {name}={shlex.quote(value)} && python x.py",
    "json": lambda name, value: json.dumps({"a": 1, name: value, "b": 2}),
    "indented json": lambda name, value: json.dumps({"a": {name: value, "b": [2]}}, indent=2),
    "json in json": lambda name, value: json.dumps({"text": json.dumps({name: value})}),
    "python": lambda name, value: repr({"a": 1, name: value, "b": 2}),
    "tuple": lambda name, value: repr((name, value)),
    "yaml": lambda name, value: yaml.safe_dump({"a": {name: value, "z": 1}}, allow_unicode=True),
    "flow yaml": lambda name, value: yaml.safe_dump({"a": {name: value}}, allow_unicode=True, default_flow_style=True),
    "yaml list": lambda name, value: yaml.safe_dump({name: [value, value], "z": 1}, allow_unicode=True),
    "yaml section": lambda name, value: yaml.safe_dump({name: {"x": value}, "z": 1}, allow_unicode=True),
    "kubernetes": lambda name, value: yaml.safe_dump([{"name": name, "value": value}], allow_unicode=True),
    "option": lambda name, value: f"x.py --{name} {shlex.quote(value)} --lr 3",
    "option with =": lambda name, value: f"x.py --{name}={shlex.quote(value)} --lr 3",
    "folded command": lambda name, value: f"command: python train.py --{name}\n  {shlex.quote(value)} --lr 3",
    "arguments": lambda name, value: json.dumps(["x.py", f"--{name}", value, "--lr"]),
    "arguments with =": lambda name, value: json.dumps(["x.py", f"--{name}={value}", "--lr"]),
    "arrow": lambda name, value: f"{name} => {value!r},",
    "xml": lambda name, value: f"<{name}>{value}</{name}>",
    "log": lambda name, value: f"2026-01-31 INFO [rank 0] using {name}={value!r}, x=1",
}

HARMLESS = """\
token_count=512
tokens_per_second: 53211
max_tokens: 4096
tokenizer: gpt2
author: me
commit 0123456789abcdef0123456789abcdef01234567
wandb: git commit 0123456789abcdef0123456789abcdef01234567
xxh3: 2d06800538d394c2e4f7a1b05c3d9e81
sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
step 120 | loss 2.3171 | grad_norm 0.81 | lr 3.0e-04 | 53211 tokens/s | 12.3 GiB
loss per token: 2.31
forward pass: 12 ms, backward pass: 25 ms
password_policy:
  min_length: 12
password_policy: strict
pad_token_id: 0, eos_token: "</s>", num_tokens=7, cls_token: torch.Size([1, 1, 768])
{"tokens": 4096, "token_ids": [1, 2], "authors": ["a", "b"], "session": null, "auth": false}
token: null
password: None
use_auth=True
loading /data/tokens/train-00001.bin and /opt/secrets.d/readme.md
/work/src/auth.py:123: UserWarning: session.py: 12
PWD=/work/runs SSH_AUTH_SOCK=/tmp/agent.1 TOKENIZERS_PARALLELISM=false TOKEN_FILE=/etc/x
google-auth==2.29.0 requests-oauthlib==1.3.1
git clone https://github.com/org/repo@v1 git@github.com:org/repo.git
http://node-1:29500/status?step=3&rank=0
pulling pytorch:2.11@sha256:0123456789abcdef0123456789abcdef
RuntimeError: The size of tensor a (4) must match the size of tensor b (8) at dimension 1
[rank0]:   File "/work/train.py", line 12, in main: trainer.train(data, key=lambda x: x[0])
key: value, name: gpt, primary_key=3, num_key_value_heads: 8
Basic training is done; the bearer of it
#SBATCH --signal=B:USR1@90 --requeue
gloo-barrier-timed-out-while-saving on rank 3
deepspeed.launcher.launch --world_info=eyJsb2NhbGhvc3QiOiBbMCwgMSwgMl19 --master_addr=127.0.0.1
sk-learn-compatible-models are used with task-parallel-schedules
mlflow run -p lr=0.1; docker run -p 8080:80 image; ssh -p 2222 node-1
NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0 MASTER_ADDR=node-1 MASTER_PORT=29500
"""


@pytest.mark.parametrize("each", EVERY, ids=str)
def test_a_secret_is_removed_and_the_rest_stays(each: Planted) -> None:
    found = redact(each.text)
    assert each.secret not in found
    assert REMOVED in found
    assert each.kept in found


@pytest.mark.parametrize("each", EVERY, ids=str)
def test_a_secret_is_found_in_the_middle_of_a_log(each: Planted) -> None:
    log = f"step 1 | loss 2.3\n{each.text}\nstep 2 | loss 2.2\n"
    found = redact(log)
    assert each.secret not in found
    assert found.startswith("step 1 | loss 2.3\n")
    assert found.endswith("step 2 | loss 2.2\n")


@pytest.mark.parametrize("form", FORMS)
def test_any_value_of_any_such_name_is_removed(form: str) -> None:
    for name in NAMES:
        for value in VALUES:
            text = FORMS[form](name, value)
            found = redact(text)
            left = [part for part in re.findall(r"\w{2,}", value) if re.search(rf"\b{part}\b", found)]
            assert left == [], (text, found)


@pytest.mark.parametrize("line", HARMLESS.splitlines())
def test_what_is_no_secret_stays(line: str) -> None:
    assert redact(line) == line


def test_lines_that_are_no_secrets_stay_together_too() -> None:
    assert redact(HARMLESS) == HARMLESS


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
def test_a_private_key_over_many_lines_is_removed(kind: str) -> None:
    body, block = fake_secrets.private_key(kind)
    found = redact(f"before\n{block}\nafter\n")
    assert not any(line in found for line in body)
    assert found.startswith("before\n")
    assert found.endswith("\nafter\n")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda block: json.dumps({"key": block, "step": 3}),
        lambda block: repr(block),
        lambda block: yaml.safe_dump({"deploy": {"pem": block}}),
        lambda block: "\n".join(f"[rank 0]: {line}" for line in block.splitlines()),
        lambda block: block.replace("\n", "\r\n"),
    ],
)
def test_a_private_key_is_removed_however_it_is_written(wrap: Callable[[str], str]) -> None:
    body, block = fake_secrets.private_key()
    assert not any(line in redact(wrap(block)) for line in body)


def test_a_private_key_that_was_cut_is_removed() -> None:
    body, block = fake_secrets.private_key()
    lines = block.splitlines()
    without_end, without_start = "\n".join(lines[:-1]), "\n".join(lines[4:])
    for text in (f"{without_end}\nstep 2\n", f"step 2\n{without_start}\n"):
        found = redact(text)
        assert not any(line in found for line in body)
        assert "step 2\n" in found


def test_a_mention_of_a_private_key_costs_nothing_else() -> None:
    text = f"expected {'-' * 5}BEGIN PRIVATE KEY{'-' * 5}\nstep 2 | loss 2.2\nstep 3\n"
    assert redact(text) == text


def test_a_section_with_the_name_of_a_secret_is_removed() -> None:
    text = (
        "a: 1\ncredentials:\n  user: qzme\n  key: |\n    qzfirst\n\n    qzsecond\nb: 2\napi_keys:\n- qza\n- qzb\nc: 3\n"
    )
    found = redact(text)
    assert "qz" not in found
    assert all(line in found.splitlines() for line in ("a: 1", "credentials:", "b: 2", "api_keys:", "c: 3"))


def test_values_keep_their_shape() -> None:
    values = {"lr": 0.1, "token": "abc", "auth": {"value": "x"}, "name": "gpt", "steps": [1, 2.5, None, True]}
    assert redact_values(values) == {**values, "token": REMOVED, "auth": REMOVED}


def test_escapes_of_json_hide_nothing() -> None:
    secret = next(each.secret for each in EVERY if each.kind == "GitHub")
    escaped = '{"text": "' + "".join(f"\\u{ord(letter):04x}" for letter in f"password: {secret}") + '"}'
    assert secret not in json.dumps(redact_values(json.loads(escaped)))
    assert redact_values([{"name": "HF_TOKEN", "value": "abc"}]) == [{"name": "HF_TOKEN", "value": REMOVED}]
    assert redact_values({"api_keys": ["a", {"b": "c"}], "password": 12345}) == {
        "api_keys": REMOVED,
        "password": REMOVED,
    }


def test_redacting_twice_changes_nothing() -> None:
    texts = [each.text for each in EVERY]
    texts += [form(name, value) for form in FORMS.values() for name in NAMES for value in VALUES]
    once = [redact(text) for text in texts]
    assert [redact(text) for text in once] == once


FRAGMENTS = [
    "a", "token", "token=", "token=a ", "password: ", "password: a\n", "a=b\n", "\n", " ", '"', "'", "\\", "a:",
    "a:b@c ", "://", "://a:b/", "https://u:p@h ", "eyJ", "eyJ-", "sk-", "-", "--token ", "<a", "<password>", "{",
    "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n", "-----END PRIVATE KEY-----",
    "-----END PRIVATE KEY-----\n", "token: {", "password:\n", "password:\n\n\n", " password:\n", "api_keys:\n- a\n",
    "curl -u a ", "mysql -p", "wandb ", "0123456789abcdef", "AKIA", "Basic aaaa ", "Bearer ", "$6$", "\x1b[", "login ",
    "login x password ", "ENV a ", "name: token value: x ", '("token", "a"),', "SG.-", "token%3D", "token==1 ",
    'token="', "token='\\", "API key: ", "?sig=a&", "token:\n a\n", "token: |\n", "{token: ", "token=(",
    "a" * 30 + "\n", "a.b-c_d ", "\r", "12345678:",
]  # fmt: skip


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=repr)
def test_the_time_grows_with_the_text_only(fragment: str) -> None:
    """With quadratic time, this would take minutes."""
    text = fragment * (500_000 // len(fragment))
    start = time.process_time()
    redact(text)
    assert time.process_time() - start < 10


def test_the_time_for_five_megabytes_of_hostile_text_is_linear() -> None:
    part = 5_000_000 // len(FRAGMENTS)
    text = "".join(fragment * (part // len(fragment)) for fragment in FRAGMENTS)
    start = time.process_time()
    redact(text)
    assert time.process_time() - start < 60
