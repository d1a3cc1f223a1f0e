"""A line of a log: which rank and which node wrote it, and what it says without prefixes.

Every launcher marks lines in its own way:

    [rank3]: text                          torchrun since 2.1
    [default3]: text                       torchrun --tee
    3: text                                srun --label
    [1,3]<stderr>: text                    mpirun --tag-output
    (RayTrainWorker pid=71, ip=10.0.0.2) text
    node-1: text                           pdsh, DeepSpeed
    gpu-7:812:901 [3] NCCL WARN text       NCCL
    2024-08-12T10:00:00.123Z text          docker, kubectl
    trainer-1  | text                      docker compose
    [2024-03-19, 02:41:31 UTC] {subprocess.py:93} INFO - text              Airflow
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
_TIME = re.compile(r"\[?(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?\s")
_PREFIXES = (
    re.compile(r"\[(?:default|rank[ _]?)(?P<rank>\d+)\]:?\s?"),
    re.compile(r"\[\d+,(?P<rank>\d+)\]<std(?:err|out|diag)>:\s?"),
    re.compile(r"\[(?P<rank>\d+)\]<std(?:err|out)>:\s?"),
    re.compile(r"\((?:[\w.:]+\s+)?pid=(?P<pid>\d+)(?:, ip=(?P<node>[\w.:-]+))?\)\s?"),
    re.compile(r"\s{0,4}(?P<rank>\d{1,5}): (?!\d)"),
    re.compile(r"\[(?P<node>[a-zA-Z][\w.-]*)\]:? (?=\[rank)"),
    re.compile(
        r"(?!\S*(?:Error|Exception|Warning)\b)(?P<node>[a-zA-Z][\w.-]*\d[\w.-]*): (?=\S|\s+File \"|\s{4})(?!.{0,3}$)"
    ),
    re.compile(r"[\w.-]+-\d+\s+\| ?"),
    re.compile(r"(?:stdout|stderr) [FP] "),
    re.compile(r"\[[^\]]{10,40}\] \{[\w.]+:\d+\} [A-Z]+ - "),
)
# Inside the text, where the writer names itself.
_NAMED = re.compile(
    r"\[(?:PG \w+ )?(?:PG ID \d+ PG GUID \S+ )?[Rr]ank (?P<rank>\d+)\]|^\[?[Rr]ank (?P<first>\d+)\b"
    r"|\brank=(?P<equal>\d+)\b"
)
_NCCL = re.compile(r"(?:^|\s)(?P<node>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<rank>\d+)\] ")
_LOGGER = re.compile(r"^[EWIFC]\d{4} \d\d:\d\d:\d\d")


@dataclass(frozen=True)
class LogLine:
    file: str
    number: int  # from 1
    text: str  # without prefixes
    rank: int | None = None
    node: str = ""
    pid: int | None = None


def parse(file: str, number: int, raw: str, rank: int | None = None) -> LogLine:
    """`rank`: that of the file, if each rank has its own."""
    text = _ANSI.sub("", raw).rstrip("\r\n")
    if "\r" in text:  # a progress bar rewrites its line
        text = text.rpartition("\r")[2]
    node, pid = "", None
    for _ in range(3):  # prefixes of several programs follow each other
        time = _TIME.match(text)
        found = next((match for prefix in _PREFIXES if (match := prefix.match(text))), None)
        if found is None and (time is None or _LOGGER.match(text)):
            break
        if found is None:
            text = text[time.end() :] if time else text
            continue
        values = found.groupdict()
        rank = int(values["rank"]) if values.get("rank") else rank
        node = values.get("node") or node
        pid = int(values["pid"]) if values.get("pid") else pid
        text = text[found.end() :]
    if nccl := _NCCL.search(text):
        rank = int(nccl["rank"]) if rank is None else rank
        node, pid = nccl["node"], int(nccl["pid"])
    elif named := _NAMED.search(text):
        rank = int(named["rank"] or named["first"] or named["equal"])
    return LogLine(file, number, text, rank, node, pid)


_RANK_IN_NAME = re.compile(r"(?:^|[^A-Za-z])(?:local_rank|rank|worker|proc|process)[-_.]?(\d+)(?:\D|$)")
_RANK_FOLDER = re.compile(r"(?:local_rank|rank|worker)[-_.]?(\d+)")


def rank_of_file(path: str) -> int | None:
    """The rank whose output a file holds, by its name: `rank_3.log`, `rank3/train.log`, `attempt_0/3/stderr.log`."""
    *_, folder, name = ["", *path.split("/")]
    found = _RANK_IN_NAME.search(name) or _RANK_FOLDER.fullmatch(folder)
    if found:
        return int(found[1])
    return int(folder) if folder.isdecimal() and name.startswith(("stderr", "stdout")) else None
