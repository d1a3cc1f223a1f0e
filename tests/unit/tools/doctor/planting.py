"""Puts made-up secrets everywhere in a run and its environment, and looks for what of them is left in a bundle."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.run.folder import RunFolder
from paceline.tools.doctor.bundle import write_bundle
from paceline.tools.doctor.finding import Finding
from unit.tools.doctor.fake_secrets import Planted, encoded, every, forms_of, leaks


def plant(run: Path, secrets: Sequence[Planted]) -> dict[str, str]:
    """Put secrets everywhere, and return an environment with them."""
    folder = RunFolder(run)
    with folder.config.open("a") as config:
        for number, each in enumerate(secrets):
            config.write(
                f"  key_{number}: {each.secret}\nlaunch:\n  env: {{X{number}: {each.secret}}}\n"
                f"  note: |\n    {each.text}\n"
            )
            config.write(
                "".join(f"{text}\n" for text in forms_of(each))
                + f"run: {each.secret}  # {each.text}\n- {each.secret}\n"
            )
    with folder.rank_log(0).open("a") as log:
        log.writelines(f"{text}\n" for each in secrets for text in forms_of(each))
        log.write("step 2 | loss 2.2\n")
    for path in (folder.metrics, folder.ledger, folder.rank_stats(0)):
        with path.open("a") as file:
            for each in secrets:
                file.writelines(json.dumps(record) + "\n" for record in secret_records(each))
            file.write('{"half": "' + json.dumps([each.text for each in secrets])[:-4])  # of a killed writer
    report = {str(number): [*forms_of(each), *secret_records(each)] for number, each in enumerate(secrets)}
    for path in (folder.hang, folder.failure(1), folder.derived, *folder.checkpoints.glob("*/manifest.json")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"planted": report, "what": report}, indent=1))
    folder.stack(1).write_text("\n".join(text for each in secrets for text in forms_of(each)))
    args = [
        part
        for each in secrets
        for part in ("--api-key", each.secret, f"--{each.secret}", f"--lr={each.secret}", each.secret, each.text)
    ]
    folder.target.write_text(json.dumps({"kind": "script", "name": f"{secrets[0].secret}.py", "args": args}))
    environment = {}
    for number, each in enumerate(secrets):
        name = each.secret.replace("/", "_")
        (folder.logs / f"rank-{number}-{name}.log"[:200]).write_text("step 1\n")
        (folder.logs / f"{name}.d"[:200]).mkdir()
        (folder.logs / f"{name}.d"[:200] / f"token={name}"[:200]).write_text("step 1\n")
        environment |= {f"NCCL_{number}": each.secret, f"DB_{number}": each.text, f"SLURM_{name}": "1", name: "2"}
    known = (
        "MASTER_ADDR",
        "NCCL_DEBUG",
        "SLURM_JOB_NAME",
        "PATH",
        "LD_PRELOAD",
        "PYTHONPATH",
        "HOSTNAME",
        "NCCL_SOCKET_IFNAME",
    )
    return environment | {name: each.text for name, each in zip(known, secrets, strict=False)}


def secret_records(each: Planted) -> list[Any]:
    number = int(each.secret) if each.secret.isdecimal() else each.secret
    return [
        {"step": 1, "note": each.text, "what": each.secret, each.secret: 1},
        {"name": "HF", "value": number, "event": each.secret},
        {"token": number, "inner": {"password": [each.secret]}},
        {"pin": number, "code": number, "id": number, "data": number},
        {"auth": {"value": each.secret, "kind": number}},
        {"model": {"name": each.secret}, "options": [each.secret, number]},
        {
            "text": f"{each.text}\n{each.text}",
            "file": f"/data/{each.secret}/train.py",
            "function": each.secret,
            "path": each.secret,
        },
        {
            "args": ["--key", each.secret, "-p", number],
            "command": f"train.py --pin {each.secret} -x{each.secret}",
            "url": each.secret,
        },
        {"encoded": [encoded(each.secret), each.secret.encode().hex()], "reason": encoded(each.text)},
    ]


def leaked(run: Path, seed: int, findings: list[Finding], variables: dict[str, str]) -> list[tuple[str, list[str]]]:
    """What is left of planted secrets, by kind, in the bytes of a bundle, with the names in its archive."""
    target, secrets = run.parent / "x.tar.gz", every(seed)
    write_bundle(run, target, findings, variables)
    harmless = gzip.decompress(target.read_bytes()).decode()
    target.unlink()
    environment = plant(run, secrets)
    named = run.rename(run.with_name(secrets[seed % len(secrets)].secret.replace("/", "_")))
    findings = [*findings, *(Finding(each.secret, "warn", each.text, fix=each.secret) for each in secrets)]
    write_bundle(named, target, findings, variables | environment)
    found = gzip.decompress(target.read_bytes()).decode()
    # Columns of sizes and times in the archive, and numbers of placeholders, are no part of a secret.
    found = re.sub(
        r"<#\d+>|removed-\d+|^ +\d+  |(?<=\x00)[0-7]{6,11}(?=[ \x00])|paceline-\w+-\d{8}-\d{6}"
        r"|.{0,2}\d+ (?:line|value)s?",
        "\n",
        found,
        flags=re.M,
    )
    return [(each.kind, parts) for each in secrets if (parts := leaks(each, found, harmless))]
