"""Fields of requests: each is honoured, ignored because it changes no sample, or refused by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import frozen

from corerl.data import parse_json
from corerl.messages import did_you_mean, short_repr, shorten
from corerl_agents.refused import SHOWN, Refused

# What becomes of a value that is taken. A field is refused if no value is taken, or only those that ask for nothing.
Becomes = Literal["honoured", "ignored", "refused"]
UNSUPPORTED = "unsupported_parameter"


@frozen(kw_only=True)
class Values:
    """Those that a field may have, besides null, which is as good as leaving it out."""

    wanted: str
    fits: Callable[[Any], bool] = lambda value: False
    taken: tuple[Any, ...] = ()  # examples, for the documentation and the tests
    refused: tuple[Any, ...]  # likewise


@frozen(kw_only=True)
class Field(Values):
    """A field of requests."""

    becomes: Becomes
    why: str  # what the value does, or what to do in place of sending one
    code: str = "invalid_request"  # of the error for any other value


def of_kind(of: type, wanted: str, *, taken: Any, refused: Any) -> Values:
    return Values(wanted=wanted, fits=lambda value: isinstance(value, of), taken=(taken,), refused=(refused,))


def is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, of) for each in value)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def same(value: Any, wanted: Any) -> bool:
    """Equal, with false no 0 and true no 1."""
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


COUNT = Values(
    wanted="a whole number of at least 1",
    fits=lambda value: is_whole(value) and value >= 1,
    taken=(1,),
    refused=(0, 2.5, True),
)
WHOLE = Values(wanted="a whole number", fits=is_whole, taken=(7,), refused=("7",))
TEXT = of_kind(str, "a string", taken="any", refused=7)
SWITCH = Values(wanted="True or False", fits=lambda value: isinstance(value, bool), taken=(True, False), refused=(1,))
OBJECT = of_kind(dict, "an object", taken={"step": "2"}, refused="2")
OBJECTS = Values(
    wanted="a list of objects", fits=lambda value: is_list(value, dict), taken=([],), refused=(["add"], {"a": 1})
)


def _field(
    becomes: Becomes, values: Values, why: str, *, taken: tuple[Any, ...] = (), refused: tuple[Any, ...] = ()
) -> Field:
    return Field(
        becomes=becomes,
        why=why,
        wanted=values.wanted,
        fits=values.fits,
        taken=taken or values.taken,
        refused=refused or values.refused,
    )


honoured = functools.partial(_field, "honoured")
ignored = functools.partial(_field, "ignored")


def only(
    *values: Any, why: str = "", refused: tuple[Any, ...], becomes: Becomes = "refused", do: str = "leave it out"
) -> Field:
    """Taken with these values alone."""
    return Field(
        becomes=becomes,
        why=why or "another value would change the answer",
        wanted=f"{' or '.join(map(repr, values))}; {do}",
        fits=lambda value: any(same(value, each) for each in values),
        code=UNSUPPORTED,
        taken=values,
        refused=refused,
    )


def never(why: str, *, refused: tuple[Any, ...]) -> Field:
    """Refused whatever its value."""
    return Field(becomes="refused", why=why, wanted=f"no such field: {why}", code=UNSUPPORTED, refused=refused)


NOBODYS = "changes nothing"
# What sampling is done with; requests may repeat it.
SAMPLING = {
    "temperature": "only the run's own value, `rollout.temperature`",
    "top_p": "only the run's own value, `rollout.top_p`",
    "top_k": "only the run's own value, `rollout.top_k`, or -1 where that is 0",
}


def read_object(body: str | bytes, wanted: str) -> dict[str, Any]:
    """The JSON object of a request; one that is none is refused with what is `wanted`. Raises Refused."""
    try:
        asked = parse_json(body)
    except ValueError as error:
        raise Refused(f"the request is not valid JSON: {error}") from error
    if not isinstance(asked, dict):
        raise Refused(wanted)
    return asked


def checked(
    asked: Mapping[str, Any], fields: Mapping[str, Field], sampling: Mapping[str, float], *, where: str = ""
) -> dict[str, Any]:
    """The fields of a request that are given. `sampling`: the run's values of temperature, top_p and top_k. `where`
    stands before the names in errors. Raises Refused for a field or a value that is not taken."""
    for name, value in asked.items():
        _require_fitting(where, name, value, fields, sampling)
    return {name: value for name, value in asked.items() if value is not None}


def _require_fitting(
    where: str, name: str, value: Any, fields: Mapping[str, Field], sampling: Mapping[str, float]
) -> None:
    def got() -> str:  # only where it is refused: the messages alone may be long
        return f"{where}{shorten(name, SHOWN)}: got {short_repr(value, SHOWN)}"

    if name in sampling:
        own = sampling[name]
        off = name == "top_k" and own == 0 and same(value, -1)  # as other servers write that it is off
        if value is not None and not off and not same(value, own):
            raise Refused(
                f"{got()}, but this run samples with rollout.{name}={own!r}, as its loss assumes; leave it out",
                code=UNSUPPORTED,
            )
    elif name not in fields:
        raise Refused(
            f"{got()}, wanted no such field{did_you_mean(name, [*fields, *sampling])}; leave it out", code=UNSUPPORTED
        )
    elif value is not None and not fields[name].fits(value):
        raise Refused(f"{got()}, wanted {fields[name].wanted}", code=fields[name].code)


def fields_table(fields: Mapping[str, Field], *, sampling: bool = True) -> str:
    """The fields as a table of Markdown."""
    lines = ["| field | | taken | refused | |", "|---|---|---|---|---|"]
    for name, field in fields.items():
        taken = ", ".join(map(_shown, field.taken)) or "nothing"
        refused = ", ".join(map(_shown, field.refused)) if field.taken else "any value"
        lines.append(f"| `{name}` | {field.becomes} | {taken} | {refused} | {field.why} |")
    for name, why in SAMPLING.items() if sampling else ():
        lines.append(f"| `{name}` | honoured | the run's own value | `0.25` | {why} |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=True)}`"
