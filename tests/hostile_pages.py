"""Runs in which every text is an attempt to run a script on the page that shows them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from made_runs import START, make_run
from paceline.run.folder import RunFolder
from paceline.run.ledger import Ledger

_RUN = "window.hacked=1"
PAYLOADS = [
    f"<script>{_RUN}</script>",
    f"<img src=x onerror={_RUN}>",
    f"</script><script>{_RUN}</script>",
    f'"><svg onload={_RUN}>',
    f"'><iframe srcdoc='<script>parent.{_RUN}</script>'>",
    f"<!--<script>{_RUN}</script>",
    f"]]><script>{_RUN}</script>",
    f"</style><script>{_RUN}</script>",
    f"</pre></td><details open ontoggle={_RUN}>",
    f"javascript:{_RUN}",
    f"${{{_RUN}}}`;{_RUN}//",
    f"\\u003cscript\\u003e{_RUN}\\u003c/script\\u003e",
    f"&lt;script&gt;{_RUN}&lt;/script&gt;",
    f"<math><mtext></form><form><mglyph><style></math><img src onerror={_RUN}>",
    f"__proto__<a href=javascript:{_RUN}>x</a>",
    f"constructor');alert(1);//{_RUN}",
]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="  # a PNG file
# Where a payload is put. Names of folders and checkpoints can't hold a slash.
FIELDS = (
    "checkpoint", "metric", "evaluation", "recipe key", "recipe value", "recipe origin", "derived name",
    "derived value", "derived reason", "environment name", "environment value", "failure", "failure place", "cause",
    "warning", "log", "operation", "tag", "metric of save_best", "image name", "text name", "text",
)  # fmt: skip


def hostile_run(path: Path, payload: str) -> RunFolder:
    folder = make_run(path, steps=40, ranks=2, failed=True)
    (folder.checkpoints / payload.replace("/", "∕")).mkdir()
    records = [
        {"step": 41, "epoch": 0, "loss": 1.0, payload: 1.0},
        {"evaluation": True, "step": 41, "epoch": 0, "loss": 1.0, payload: 2.0},
    ]
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    text = json.dumps(payload)
    folder.config.write_text(f"{text}: {text}  # {payload}\ntags: [{text}]\nsave_best:\n  metric: {text}\n")
    derived = json.loads(folder.derived.read_text())
    folder.derived.write_text(json.dumps({**derived, payload: {"value": payload, "reason": payload}}))
    folder.environment.write_text(json.dumps({payload: payload}))
    folder.rank_log(1).write_text(f"{payload}\nwarning: {payload}\n")
    folder.rank_log(0).write_text(f"{payload}\nwarning: {payload}\n")
    folder.profile_split(0).parent.mkdir()
    split = {"step": 3.0, "compute": 1.0, "exposed": 1.0, "idle": 1.0, "communication": 1.0}
    folder.profile_split(0).write_text(json.dumps({**split, "operations": [[payload, 1.0, 1.0]]}))
    media = [{"kind": "image", "width": 2, "height": 2}, {"kind": "text", "text": payload}]
    folder.images.mkdir()
    folder.image(payload, 3).write_bytes(base64.b64decode(PIXEL))
    with folder.media.open("w") as file:
        file.writelines(json.dumps({**each, "name": payload, "step": 3}) + "\n" for each in media)
    Ledger(folder).note("warning", at=START + 30, text=payload)
    told = ("cause", "what", "signal", "exception", "message", "file", "function", "code", "text", "fix")
    Ledger(folder).note("failed", at=START + 100, rank=1, step=40, line=1, **dict.fromkeys(told, payload))
    Ledger(folder).note("ended", at=START + 101, status=1)
    return folder
