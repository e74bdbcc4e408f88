"""Text without secrets, for what a run keeps: its command line, and errors of its ranks.

Removed, by name: the value of an option, variable, header, JSON field or field of a URL's query whose name says password,
secret, auth, API key and the like. By form: the user and password of a URL, bearer tokens, private keys, tokens with the prefix
of their issuer (`hf_`, `sk-`, `ghp_`, `AKIA`, ...), and words that look random. By value: in an error's text, every value that
the command line or the environment gives under such a name.

Not found: a secret without a telling name or form that is hexadecimal, like checksums and commits, or consists of words, like a
passphrase; nor one that a program computed from others. A script's own output is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

__all__ = ["redacted", "redacted_fields", "redacted_words", "secret_values"]

_HIDDEN = "***"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- by name

_SURE = re.compile(
    r"secrets?|passwords?|passwd|passphrase|passcode|pwd|credentials?|creds|authorization|auth|bearer|jwt|cookies?|apikeys?"
    r"|sessionid|csrftoken|.*(?:apikey|accesskey|secretkey|privatekey|authtoken|accesstoken|password|passwd)"
)
# After these words, a key or a token is a secret.
_OPENS = _words(
    "api access secret private auth authentication refresh session security bearer deploy account signing encryption master"
)
# After these words, it is an entry of a table, or a text: `--pad-token "<pad>"`, `--image-key jpg`.
_HARMLESS = _words(
    "pad eos bos unk mask sep cls end begin start stop special added additional new next prev first last max min num n per "
    "total sort group primary foreign join hash cache dict index idx row column col text image audio video label input "
    "output target source src tgt prompt response answer question caption data feature batch sample loss metric monitor "
    "query value public by on token sub visual vision pixel time frame speech fim control chat assistant system "
    "tool think second multi single two one forward backward"
)
_HARMLESS_VALUE = re.compile(
    r"true|false|none|null|auto|yes|no|on|off|[01]|\*\*\*|disabled|enabled|default|required|optional|basic|digest|oauth2?|ldap|",
    re.I,
)
_SHORT_NUMBER = re.compile(r"[0-9]{1,4}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Names whose value is a place or an index, and often looks random.
_PLACE = _words(
    "id ids uuid run name path file files dir folder data dataset checkpoint ckpt resume hash sha commit digest url uri "
    "revision rev tag tags version model branch key shard shards output out log logs seed"
)

Kind = Literal["sure", "likely", ""]


def _parts(name: str) -> list[str]:
    return [part.lower() for part in re.split(r"[^A-Za-z0-9]+", _CAMEL.sub("_", name)) if part]


def _kind(name: str) -> Kind:
    """Whether a name is a secret's: "sure", or "likely" as `--hf-token` (but not `--pad-token`)."""
    parts = _parts(name)
    if not parts:
        return ""
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if _SURE.fullmatch(last):
        return "sure"
    if last in ("key", "token", "keys", "tokens") and before in _OPENS:
        return "sure"
    return "likely" if last in ("key", "token", "pass") and before not in _HARMLESS else ""


def _hides(name: str, value: str) -> bool:
    """Whether the name of a field, of an argument in code or of a pair in prose makes its value a secret."""
    kind = _kind(name)
    if not kind or _HARMLESS_VALUE.fullmatch(value):
        return False
    if kind == "sure" or len(_parts(name)) > 1:
        return kind == "sure" or not _SHORT_NUMBER.fullmatch(value)
    # `key="loss"` is code, and `token="the"` may be, too.
    return len(value) >= (8 if name.lower() == "token" else 12) and any(c.isdigit() for c in value)


# --- by form. Repetitions are bounded where another match may begin inside them, since a malicious text could make them hang.

_USER_INFO = re.compile(r"(?<=://)(?:[^/\s'\"<>]*@|[^/\s:@'\"<>]{0,256}:(?!\d+(?:/|$))[^\s@'\"<>]{0,256}@)")
_QUERY = re.compile(r"([?&;#](?:amp;)?)([\w.\-%\[\]]{1,64})=([^&\s'\"<>#;]*)")
_SIGNED = re.compile(r"sig|signature|x-(?:amz|goog|oss|ms)-.*|awsaccesskeyid|code|ticket|policy|key-pair-id|.*hmac", re.I)
_ISSUED = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_(?:(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{10,}|[a-z]{24,})"
    r"|api_org_[A-Za-z0-9]{20,}"
    r"|(?:sk|pk|rk)[-_](?=[\w-]{0,64}\d)(?=[\w-]{0,64}[A-Za-z])(?:live_|test_|proj-|ant-|or-)?[\w-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt)-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{10,}|GOCSPX-[\w-]{20,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dop_v1_[0-9a-f]{32,}|dapi[0-9a-f]{32}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|(?:nvapi|gsk|r8|wandb_v1|lsv2_(?:pt|sk)|tskey|shpat|figd|ntn|xai|pplx|whsec)[-_](?=[\w-]{0,64}\d)[\w-]{20,}"
    r"|eyJ[\w-]{6,1024}\.eyJ[\w-]{6,4096}\.[\w-]*"
    r"|\d{8,10}:AA[\w-]{30,}"
    r")"
)
_HOOK = re.compile(r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[\w/-]+")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S)
_BEARER = re.compile(r"\b((?:Bearer|Basic|Token)\s+)(?=[\w.~+/=-]*[\dA-Z=_])[\w.~+/-]{8,}=*", re.I)
_HEADER = re.compile(
    r"\b((?:proxy-)?authorization|(?:set-)?cookie|[\w-]{0,40}(?:api-?key|auth-?token|access-?token|-secret|-password))(\s*:\s*)"
    r"(?!\s*[\[{\"'])([^\r\n'\"\\]+)",
    re.I,
)
# "name": "value" of JSON, 'name': 'value' of Python, name="value" of code, name=value of a connection; both quoted, or none.
_FIELD = re.compile(
    r"(?P<q>\\?[\"'])(?P<name>[\w.\- ]{2,64})(?P=q)(?P<op>\s*[:=]\s*)(?P<v>\\?[\"'])(?P<value>(?:(?!(?P=v)).)*)(?P=v)", re.S
)
_NUMBER_FIELD = re.compile(r"(\\?[\"'])([\w.\- ]{2,64})\1(\s*[:=]\s*)(\d{3,})")
_ASSIGNED = re.compile(r"(?<![\w.\-$])(?P<name>[A-Za-z_][\w.\-]{1,63})(?P<op>\s?=\s?)(?P<v>[\"'])(?P<value>[^\"'\n]*)(?P=v)")
_PAIR = re.compile(r"(?<![\w.\-$/?&])(?P<name>[A-Za-z_][\w.\-]{1,63})=(?P<value>[^\s;,&'\"()\[\]{}<>=][^\s;,&'\"()\[\]{}<>]*)")
_OPTION = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]*)(?P<op>['\"]?,?\s+['\"]?|=['\"]?)(?P<value>[^\s'\",\]]+)")
# In prose a run's id looks like a secret, so only words longer than ids count.
_LETTERS = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
_RARE = set("jkqvwxyzJKQVWXYZ")


def _is_drawn(word: str) -> bool:
    """Whether a word looks random: upper case, lower case and digits in no order, with many rare letters.

    A CamelCase name has no rare letters, a version few digits, a checksum only one case.
    """
    word = word.rstrip("=")
    if not 24 <= len(word) <= 512 or word[0] in "/-" or not re.fullmatch(r"[A-Za-z0-9+/_-]+", word):
        return False
    if max(map(len, re.findall(r"[A-Za-z0-9+]+", word))) < 16 or len(set(word)) < 14:
        return False
    letters = [c for c in word if c.isalpha()]
    kinds = ["u" if c.isupper() else "l" if c.islower() else "d" for c in word if c.isalnum()]
    changes = sum(a != b for a, b in pairwise(kinds)) / len(kinds)
    digits = len(re.findall(r"\d+", word))
    rare = sum(c in _RARE for c in letters) / max(1, len(letters))
    return {"u", "l", "d"} <= set(kinds) and changes >= 0.4 and digits >= (1 if len(word) >= 32 else 2) and rare >= 0.13


def _hide_query(match: re.Match[str]) -> str:
    between, name, value = match.groups()
    if _SIGNED.fullmatch(name) or _kind(name) or _is_drawn(value):
        return f"{between}{name}={_HIDDEN}" if value else match[0]
    return match[0]


def _forms(text: str) -> str:
    text = _PEM.sub(_HIDDEN, text)
    if "://" in text:
        text = _USER_INFO.sub(f"{_HIDDEN}@", text)
        text = _HOOK.sub(rf"\g<1>{_HIDDEN}", text)
    text = _QUERY.sub(_hide_query, text)
    text = _BEARER.sub(rf"\g<1>{_HIDDEN}", text)
    return _ISSUED.sub(_HIDDEN, text)


def _fields(text: str) -> str:
    def quoted(match: re.Match[str]) -> str:
        if not _hides(match["name"], match["value"]):
            return match[0]
        return match[0][: match.start("value") - match.start()] + _HIDDEN + match["v"]

    text = _FIELD.sub(quoted, text)
    return _NUMBER_FIELD.sub(lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{_HIDDEN}" if _kind(m[2]) == "sure" else m[0], text)


def redacted(text: str, known: Collection[str] = ()) -> str:
    """`text` without words that look like secrets; for prose, tracebacks or code.

    Args:
        known: secrets from `secret_values`, which are removed wherever they occur.
    """
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, _HIDDEN)

    def assigned(match: re.Match[str]) -> str:
        if not _hides(match["name"], match["value"]):
            return match[0]
        return f"{match['name']}{match['op']}{match['v']}{_HIDDEN}{match['v']}"

    def pair(match: re.Match[str]) -> str:
        # In code, an unquoted word after the sign is a name, so only words that cannot be names are values.
        value = match["value"]
        is_code = re.fullmatch(r"[A-Za-z_][A-Za-z_.]*", value) is not None
        hide = not is_code and _hides(match["name"], value)
        return f"{match['name']}={_HIDDEN}" if hide else match[0]

    def option(match: re.Match[str]) -> str:
        hide = match["name"].startswith("--") and not match["value"].startswith("-") and _of_option(match["name"], match["value"])
        return f"{match['name']}{match['op']}{_HIDDEN}" if hide else match[0]

    text = _HEADER.sub(_header, _fields(_forms(text)))
    text = _OPTION.sub(option, _PAIR.sub(pair, _ASSIGNED.sub(assigned, text)))
    return _LETTERS.sub(lambda m: _HIDDEN if "/" not in m[0] and _is_drawn(m[0]) else m[0], text)


def _of_option(name: str, value: str) -> bool:
    """Whether an option's name makes its value a secret: `--key VALUE` does, too."""
    kind = _kind(name)
    return bool(kind) and not _HARMLESS_VALUE.fullmatch(value) and (kind == "sure" or not _SHORT_NUMBER.fullmatch(value))


def _header(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{_HIDDEN}"


def _value(name: str, value: str) -> str:
    """The value of an option or variable whose name is not a secret's."""
    place = bool(set(_parts(name)) & _PLACE)
    return _HIDDEN if not place and _is_drawn(value) else _word(value)


def _word(word: str) -> str:
    """A word of a command line that no name marks as a secret."""
    if word.lstrip()[:1] in ("{", "["):
        return _HEADER.sub(_header, _fields(_forms(word)))
    text = _HEADER.sub(_header, _forms(word))
    if ";" in text or "," in text or " " in text:  # Server=db;Password=abc
        text = _PAIR.sub(lambda m: f"{m['name']}={_HIDDEN}" if _kind(m["name"]) == "sure" else m[0], _fields(text))
    return text


_IS_OPTION = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?", re.S)
_NAMED = re.compile(r"(?P<name>[-+~]*[\w.\-/@]*\w)=(?P<value>.*)", re.S)


def _hidden_words(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """For each word, the text to show, and the value hidden because of its name."""
    name = ""
    for word in words:
        before, name = name, ""
        named = _NAMED.fullmatch(word)
        if before and not _IS_OPTION.fullmatch(word) and _of_option(before, word):
            yield _HIDDEN, word
        elif named is not None:
            secret = _of_option(named["name"], named["value"])
            shown = _HIDDEN if secret else _value(named["name"], named["value"])
            yield f"{named['name']}={shown}", named["value"] if secret else ""
        elif word.startswith("-") and len(word) > 1 and not word[1:2].isdigit() and " " not in word:
            name = word
            yield _word(word), ""
        elif before.strip("-") in ("u", "user", "proxy-user") and ":" in word:
            yield f"{word.partition(':')[0]}:{_HIDDEN}", word.partition(":")[2]
        else:
            yield _value(before, word), ""


def redacted_words(words: Sequence[str]) -> list[str]:
    """The words of a command line, without values that are named as secrets or look like them."""
    return [shown for shown, _ in _hidden_words(words)]


def redacted_fields(value: Any, name: str = "") -> Any:
    """Plain values, as in JSON, without those named as secrets, and without texts that look like them."""
    if isinstance(value, dict):
        return {key: redacted_fields(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [redacted_fields(each, name) for each in value]
    if isinstance(value, str):
        return _HIDDEN if _hides(name, value) else _value(name, value)
    return _HIDDEN if type(value) in (int, float) and _kind(name) == "sure" else value


def secret_values(words: Sequence[str], environment: Mapping[str, str]) -> set[str]:
    """The secrets that a command line and an environment give by name, for `redacted`.

    Short values are left out, since hiding each `abc` would hide the text; so are paths, which name a file.
    """
    secrets = {hidden for _, hidden in _hidden_words(words)}
    secrets |= {value for name, value in environment.items() if name not in ("PWD", "OLDPWD") and _kind(name)}
    return {value for value in secrets if len(value) >= 6 and not value.startswith(("/", "./", "~")) and not value.isdigit()}
