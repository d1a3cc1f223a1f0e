"""Removes secrets from text, so that logs and settings can be attached to a bug report.

    redact("export HF_TOKEN=hf_abc; python train.py --lr 3e-4")

A secret is found by the name before it (`password: …`, `--api-key …`), by its place (`https://user:…@host`,
`curl -u …`) or by its form (`ghp_…`, a PEM block). If in doubt, a value is removed: a gap in a report is better than a
leaked key. Names stay, so that a reader knows what was there.

The text may be hostile. The time is linear in its size, because a search continues after whatever it has scanned:
quantifiers are possessive (`++`) or bounded, and no pattern can fail after a long scan and start over inside it.
"""

from __future__ import annotations

import base64
import binascii
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

REMOVED = "<removed>"

# What a name says about its value. strong: a secret; weak: a secret, unless it is a small number; context: it depends.
Kind = Literal["", "weak", "strong", "context"]

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STRONG = re.compile(
    r"passw|passphrase|secret|credential|cookie|authorization|apikey|"
    r"(?:access|private|account|signing|encryption|licen[cs]e|shared|master|auth|ssh|deploy|subscription|storage)key|"
    r"(?:access|auth|api|refresh|bearer|session|security|csrf|hf|hub|github|gitlab|slack|wandb|sas)tokens?$"
)
_WEAK = {"token", "auth", "oauth", "session", "signature", "jwt", "bearer", "pat", "pass", "dbpass"}
_QUALIFIERS = {"id", "value", "key", "header", "string", "data", "base64", "prod", "dev", "test", "staging", "old"}
_ABOUT = {  # last words of names that are about secrets, and of files
    "policy", "policies", "count", "length", "len", "size", "limit", "file", "filename", "path", "dir", "name", "names",
    "type", "types", "provider", "method", "class", "manager", "rules", "version", "expiry", "expires", "timeout",
    "ttl", "enabled", "required", "weight", "bias", "py", "json", "yaml", "yml", "txt", "log", "sh", "md", "cpp", "cu",
}  # fmt: skip
_OF_A_MODEL = {  # tokens of a language model, and passes through it
    "pad", "eos", "bos", "unk", "mask", "cls", "class", "sep", "image", "audio", "special", "prompt", "start", "stop",
    "end", "num", "max", "min", "per", "a", "each", "next", "first", "last", "previous", "current", "decoder", "dist",
    "register", "forward", "backward", "single", "second", "one", "low", "high",
}  # fmt: skip
_IN_QUERY = {"sig", "key", "code", "sign", "hmac", "pw", "pass"}
_CONTEXT = _IN_QUERY | {"name", "keys", "value", "token"}

_ASSIGNED = r"""(?:\\*+["'`])?+\]?+[ \t]*+(?:[?+:]?={1,3}+>?|:(?!:|//)|%3[Dd]|\\u003[Dd])[ \t]*+"""
_IN_TUPLE = r"""\\*+["'],[ \t]*+(?=b?\\*["'])"""  # ("password", "…")
_NAMES = (
    re.compile(rf"(?<![\w.-])([\w.-]++)({_ASSIGNED}|{_IN_TUPLE})"),
    # An option. YAML folds a long command, and a shell continues it after a backslash.
    re.compile(r"""(?<![\w.-])(--?[A-Za-z][\w.-]*+)(["']?(?:[ \t]++(?!\\)|[ \t]*+\\?\r?\n[ \t]++))(?![-\s=:])"""),
    re.compile(r"(?:login|machine)[ \t]++\S++\s++(password|passwd)([ \t]++)"),  # .netrc
    re.compile(r"(?:setenv|ENV|ARG)[ \t]++([\w.-]++)([ \t]++)(?![=:])"),  # csh, Dockerfile
    re.compile(r"(password|PASSWORD|IDENTIFIED BY)([ \t]++)(?=[\"'])"),  # SQL
)
_INNER = r"(?:(?!\1\2)\\?[^\r\n])*+"
_QUOTED = re.compile(  # 'it''s' in YAML and 'it'"'"'s' in a shell are one value
    r"""[bBrRuUfF]{0,2}(\\*)("{3}|'{3}|["'`])"""
    rf"""(?P<body>{_INNER}(?:(?:\1\2\1\2|'"'"'){_INNER})*+)(?:\1\2)?(?P<joined>[^\s"'`,;:)\]}}>\\&|</]*+)"""
)
_COLOR = re.compile(r"(?:\x1b|\\u001[bB]|\\x1[bB]|\\033)\[[0-9;]*+[A-Za-z]")
_LINE = re.compile(r"[^\r\n]*+")
_QUERY_VALUE = re.compile(r"""[^\s&#"']*+""")
_LINE_START = re.compile(r"""[ \t]*+(?:[-+>#] ?)?+(?:(?:export|set|declare -x) )?+["']?+""")
_WORD_BEFORE = re.compile(r"([A-Za-z]{1,20})[ \t]$")
_NAME_AFTER = re.compile(r"""\\*+["']?([\w.-]{0,100})""")
_BEFORE = 150  # characters before a name that are looked at
_NOTHING = re.compile(r"(?i)(?:null|none|nil|true|false|yes|no|~|<removed>|\*+|\.{3}|)[\s,;)\]}]*")
_NUMBER = re.compile(r"(?i)-?(?:\d{1,5}|\d*\.\d+(?:e[+-]?\d+)?|\de[+-]?\d+)[\s,;)\]}]*")
_KEY_LINE = re.compile(
    r"""(?m)^([ \t]{0,200}+(?:-[ ]{1,8}+)?+)["']?([\w.-]++)["']?[ \t]*+:(?![:/\w])[ \t]*+([^\n]*+)\n"""
)

_ELEMENT = re.compile(r"(<([\w:.-]++)(?:[ \t][^<>\n]*+)?+>(?:<!\[CDATA\[)?+)[^<]++(?=</|\Z)")
_URL = re.compile(r"""://([^\s"'`]++)""")
_HOST = re.compile(r"[/?#]")
_HOST_NAME = re.compile(r"(?!sha256:)\d*+[A-Za-z.\[]")
_LOGIN = re.compile(r"""(?<![\w.:/@+-])([A-Za-z_][\w.+-]*+):(?!//)([^\s"'`]++)""")
_BEARER = re.compile(r"([Bb]earer[ \t]++)[\w.~+/=-]{8,}+")
_BASIC = re.compile(r"([Bb]asic[ \t:]++)([A-Za-z0-9+/]{4,}+)={0,2}")
_FORTY = re.compile(r"(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])")
_HEX = re.compile(r"[0-9a-f]+")
_PEM_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
_PEM_LINES = re.compile(
    r"\s*+(?:[A-Z][\w-]{2,20}+:[^\n]*+\n\s*+)*+(?:[^\n]{0,80}?[A-Za-z0-9+/=]{20}[^\n]*+(?:\n|\Z))++"
)
_PEM_LINE = re.compile(r"[^\n]{0,80}?[A-Za-z0-9+/=]{20,}+[\s\"',\\]*+")
_MAX_PEM = 20_000  # characters: a key of 16384 bits has 13,000

_EDGE = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"  # for prefixes that also occur inside words
_PLAIN = re.compile(r"[\w. ]{0,14}|[0-9a-f]{32}")  # too short to be a key, or a hash of a checkpoint: most strings
_LONG = re.compile(r"[^\s\"'<>]{15,}+")
_FORMATS = re.compile(
    r"gh[a-z]_[A-Za-z0-9]{16,}+|github_pat_\w{16,}+|gl(?:pat|dt|rt|cbt|ptt)-[\w-]{16,}+|A(?:KI|SI)A[A-Z0-9]{12,}+|AIza[\w-]{30,}+|"
    r"ya29\.[\w.-]{10,}+|xox[a-z]-[\w-]{10,}+|xapp-[\w-]{10,}+|eyJ[\w-]{12,}+(?:\.[\w-]*+){0,4}+|"
    r"[sr]k_(?:live|test)_\w{8,}+|whsec_\w{16,}+|dckr_pat_[\w-]{16,}+|nvapi-[\w-]{16,}+|hvs\.[\w-]{16,}+|"
    r"AGE-SECRET-KEY-\w++|dop_v1_\w{16,}+|tskey-[\w-]{10,}+|(hooks\.slack\.com/)[^\s\"'<>]++|"
    r"(discord(?:app)?\.com/api/webhooks/)[^\s\"'<>]++|"
    rf"{_EDGE}(?:sk-[\w-]{{16,}}+|hf_[A-Za-z0-9]{{16,}}+|npm_[A-Za-z0-9]{{30,}}+|"
    r"pypi-[\w-]{16,}+|SG\.[\w-]{10,}+\.[\w-]{10,}+|SK[0-9a-f]{32}|gsk_\w{20,}+|r8_\w{20,}+|"
    r"xai-\w{20,}+|wandb_v\d_\w{20,}+|dapi[0-9a-f]{32}|\d{8,10}:AA[\w-]{30,}+)|"
    r"\$(?:\d[a-z]?|g?y|apr1|sha1|argon2\w{1,2}|scrypt)\$[^\s:\"']{13,}+|\{S?SHA\d*\}[\w+/=]{20,}+"  # of /etc/shadow
)


def _options(flags: str) -> re.Pattern[str]:
    return re.compile(rf"""((?<![\w-])(?:{flags})(?:["'],[ \t]*+|[ \t=]*+))(?:(\\*["'])(?:(?!\2)[^\n])*+|[^\s"']++)""")


_COMMANDS = [(re.compile(rf"{command}[^\n]*+"), _options(flags)) for command, flags in (
    ("sshpass", "-p"), ("mysql", "-p"), ("mariadb", "-p"), ("curl", "-u|-U|--user|--proxy-user"), ("redis-cli", "-a"),
    ("login", "-p"), ("ldap", "-w"), ("zip", "-P"), ("ssh-keygen", "-N|-P"), ("openssl", "-pass(?:in|out)?"),
)]  # fmt: skip


def redact(text: str) -> str:
    """The text without secrets. Terminal colors are removed too, since they may separate a name from its value."""
    text = _COLOR.sub("", text)
    for find in (_private_keys, _cut_keys, _keys_by_neighbor, _sections):
        text = _without(text, find(text))
    text = _LOGIN.sub(_without_login, _URL.sub(_without_user, text))
    for command, options in _COMMANDS:
        text = command.sub(partial(_without_options, options), text)
    for pattern in _NAMES:
        text = _without(text, _named(text, pattern))
    text = _ELEMENT.sub(lambda found: found[1] + REMOVED if is_secret(found[2]) else found[0], text)
    text = _BASIC.sub(_without_basic, _BEARER.sub(rf"\1{REMOVED}", text))
    return _LONG.sub(lambda found: _FORMATS.sub(_without_format, found[0]), text)


def redact_values(values: Any) -> Any:
    """The same for parsed JSON, where no escape hides a secret and the extent of each value is known."""
    if isinstance(values, dict):
        announced = any(isinstance(values.get(key), str) and is_secret(values[key]) for key in ("name", "key"))
        names = {key: "secret" if announced and key == "value" else str(key) for key in values}
        return {redact_values(str(key)): _redact_value(names[key], value) for key, value in values.items()}
    if isinstance(values, list):
        return [redact_values(value) for value in values]
    return redact(values) if isinstance(values, str) and not _PLAIN.fullmatch(values) else values


def _redact_value(name: str, value: Any) -> Any:
    if not is_secret(name):
        return redact_values(value)
    return value if not isinstance(value, (dict, list)) and _is_harmless(name, kind_of(name), str(value)) else REMOVED


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    words = [word.lower() for word in _WORDS.findall(name)]
    if len(words) == 1 and words[0] in _CONTEXT:
        return "context"
    if not words or words[-1] in _ABOUT:
        return ""
    if _STRONG.search("".join(words)) or any(word.endswith("pwd") for word in words):
        return "strong"
    if words[-1] == "key" and name.isupper():
        return "strong"
    while len(words) > 1 and (words[-1] in _QUALIFIERS or words[-1].isdigit()):
        words.pop()
    if len(words) > 1 and words[-2] in _OF_A_MODEL:
        return ""
    return "weak" if words[-1] in _WEAK or words[-1].endswith("token") else ""


def is_secret(name: str) -> bool:
    return kind_of(name) in ("weak", "strong") or name.lower() in ("token", "pass")


def _is_harmless(name: str, kind: Kind, value: str) -> bool:
    if name in ("PWD", "OLDPWD") and value.startswith("/"):  # the working directory
        return True
    return bool(_NOTHING.fullmatch(value) or (kind != "strong" and _NUMBER.fullmatch(value)))


def _without(text: str, spans: Iterable[tuple[int, int]]) -> str:
    parts, done = [], 0
    for start, end in spans:
        parts += [text[done:start], REMOVED]
        done = end
    return "".join([*parts, text[done:]]) if parts else text


class _Place(NamedTuple):
    """Where a name is."""

    name: str
    before: str  # in the same line
    separator: str
    is_in_query: bool


def _named(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """The values of secrets that have a name."""
    done, announced = 0, False  # announced: the last `name: …` was that of a secret, so its `value: …` is one
    for found in pattern.finditer(text):
        kind = kind_of(found[1][-100:])
        if not kind or found.start() < done:
            continue
        at = found.start(1)
        before = text[max(0, at - _BEFORE) : at].rpartition("\n")[2]
        place = _Place(found[1].strip("-."), before, found[2], text[at - 1 : at] in ("?", "&"))
        if place.name in ("name", "key"):
            after = _NAME_AFTER.match(text, found.end())
            announced = after is not None and is_secret(after[1])
        if kind == "context":
            kind = _in_context(place, announced)
        if kind and not _is_value(place):
            start, end = _value(text, found.end(), place, kind)
            is_version = "==" in place.separator and text[start : start + 1].isdigit()  # google-auth==2.29.0
            is_done = text.startswith(REMOVED, start)  # what follows in the line is not part of the value
            if not is_version and not is_done and not _is_harmless(place.name, kind, text[start:end]):
                done = end
                yield start, end


def _in_context(place: _Place, announced: bool) -> Kind:
    name = place.name.lower()
    if (name == "value" and announced) or (place.is_in_query and name in _IN_QUERY):
        return "strong"
    word = _WORD_BEFORE.search(place.before[-21:]) if name in ("key", "keys", "token") else None
    if word:  # "API key: …", "loss per token: 2.3"
        return kind_of(f"{word[1].lower()}_{name}")
    return "weak" if name == "token" else ""


def _is_value(place: _Place) -> bool:
    """Whether what looks like the first of two strings is the value of another name: {"name": "HF_TOKEN", "a": 1}"""
    is_string = place.separator.lstrip("\\")[1:2] == ","
    return is_string and place.before[:-1].rstrip("b\\ \t")[-1:] not in ("(", "[", ",")


def _value(text: str, start: int, place: _Place, kind: Kind) -> tuple[int, int]:
    quoted = _QUOTED.match(text, start)
    if quoted:
        return quoted.start("body"), quoted.end() if quoted["joined"] else quoted.end("body")
    found = (_LINE if text[start : start + 1] in ("{", "[", "(") else _unquoted(place, kind)).match(text, start)
    end = found.end() if found else start
    while end > start + 1 and text[end - 1] in ",;)]} \t":
        end -= 1
    return start, end


def _unquoted(place: _Place, kind: Kind) -> re.Pattern[str]:
    """What a value without quotes looks like at a place."""
    if place.is_in_query:
        return _QUERY_VALUE
    before, is_colon = place.before, ":" in place.separator
    is_first = len(before) < _BEFORE and _LINE_START.fullmatch(before) is not None
    is_flow = is_colon and before.count("{") > before.count("}")  # {name: value, name: value}
    ends = ",}" if is_flow else ""
    for quote in "\"'":
        opened = before.rfind(quote)
        if opened >= 0 and not before[opened - 1 : opened].isalnum():
            ends += quote
    is_string = before[-1:] in ("'", '"') and place.separator[:1] not in ("'", '"')  # "--token=…"
    is_phrase = is_flow or is_string or (is_first and (is_colon or kind == "strong")) or (is_colon and kind == "strong")
    return _unquoted_pattern(ends, is_phrase and bool(place.separator.strip()), is_colon, is_first)


@lru_cache
def _unquoted_pattern(ends: str, is_phrase: bool, is_colon: bool, is_first: bool) -> re.Pattern[str]:
    if not is_phrase:
        return re.compile(rf"(?:\\\S|[^\s{ends}])*+")
    stops = [r"[ \t](?:&&|\|\||[;|])[ \t]"]  # the next command
    stops += [] if is_colon else [r";[ \t]"]
    stops += [r"[ \t]++#[ \t]"] if is_colon and is_first else []  # a comment
    return re.compile(rf"(?:(?!{'|'.join(stops)})(?:\\[^\r\n]|[^\r\n{ends}]))*+")


def _sections(text: str) -> Iterator[tuple[int, int]]:
    """Deeper lines after the name of a secret, in YAML and in indented JSON."""
    done = 0
    for found in _KEY_LINE.finditer(text):
        lead, name, value = found.groups()
        has_value = bool(value.strip())
        if found.start() < done or not is_secret(name[-100:]):
            continue
        if has_value and kind_of(name[-100:]) != "strong" and value[0] not in "|>\"'[&!":
            continue
        lines = _deeper(len(lead), None if has_value else len(lead.rstrip("- "))).match(text, found.end())
        if lines and lines[0]:
            done = lines.end() - lines[0].endswith("\n")
            yield found.end(), done


@lru_cache
def _deeper(indent: int, items_indent: int | None) -> re.Pattern[str]:
    items = "" if items_indent is None else rf"|[ \t]{{{items_indent}}}-[ \t][^\n]*+(?:\n|\Z)"
    return re.compile(rf"(?:(?:[ \t]*+\r?\n)*+[ \t]{{{indent + 1},}}+(?=\S)[^\n]*+(?:\n|\Z){items})*+")


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    """PEM blocks, in one line or many."""
    ends = [found.start() for found in _PEM_END.finditer(text)]
    starts = [found.end() for found in _PEM_BEGIN.finditer(text)]
    done = 0
    for start in starts:
        if start < done:
            continue
        following = bisect_left(ends, start)
        if following < len(ends) and ends[following] - start <= _MAX_PEM:
            done = ends[following]
        else:  # the log was cut, or it mentions the first line only
            lines = _PEM_LINES.match(text, start, start + _MAX_PEM)
            done = lines.end() if lines else start
        if start < done:
            yield start, done


def _cut_keys(text: str) -> Iterator[tuple[int, int]]:
    """The last lines of PEM blocks whose beginning was cut."""
    done = 0
    for found in _PEM_END.finditer(text):
        first = last = text.rfind("\n", done, found.start()) + 1
        while first > done:
            line = max(done, text.rfind("\n", done, first - 1) + 1)
            if not _PEM_LINE.fullmatch(text, line, first):
                break
            first = line
        done = found.end()
        if first < last:
            yield first, last - 1


def _keys_by_neighbor(text: str) -> Iterator[tuple[int, int]]:
    """Keys of W&B, which look like a commit, and of AWS, which look like a path."""
    for found in _FORTY.finditer(text):
        if _HEX.fullmatch(found[0]):
            before = text[max(0, found.start() - 80) : found.start()].rpartition("\n")[2].lower()
            if "wandb" in before and not any(word in before for word in ("commit", "revision", "sha")):
                yield found.span()
        else:
            near = text[max(0, found.start() - 300) : found.end() + 300]
            if "AKIA" in near or "ASIA" in near:
                yield found.span()


def _without_user(url: re.Match[str]) -> str:
    rest = url[1]
    host = _HOST.split(rest, maxsplit=1)[0]
    # A password may contain a slash: then what is before it is neither a host nor a host with a port.
    if "@" in host:
        rest = f"{REMOVED}@{rest[host.rfind('@') + 1 :]}"
    elif "@" in rest and ":" in host and not host.rpartition(":")[2].isdigit():
        rest = f"{REMOVED}@{rest.rpartition('@')[2]}"
    return f"://{rest}"


def _without_login(found: re.Match[str]) -> str:
    """`user:password@host`, but neither `image:tag@sha256:…` nor `--signal=B:USR1@90`"""
    password, _, host = found[2].rpartition("@")
    if not password or "://" in password or not _HOST_NAME.match(host):
        return found[0]
    return f"{found[1]}:{REMOVED}@{host}"


def _without_options(options: re.Pattern[str], line: re.Match[str]) -> str:
    return options.sub(rf"\1\2{REMOVED}", line[0])


def _without_basic(found: re.Match[str]) -> str:
    try:
        decoded = base64.b64decode(found[2][: len(found[2]) // 4 * 4], altchars=None)
    except binascii.Error:
        return found[0]
    return found[1] + REMOVED if b":" in decoded else found[0]


def _without_format(found: re.Match[str]) -> str:
    is_word = found[0].startswith(("sk-", "pypi-")) and not any(map(str.isdigit, found[0]))  # sk-learn-compatible-model
    is_plain = found[0].startswith("eyJ") and "." not in found[0]  # JSON in base64, as DeepSpeed passes to its ranks
    return found[0] if is_word or is_plain else "".join(filter(None, found.groups())) + REMOVED
