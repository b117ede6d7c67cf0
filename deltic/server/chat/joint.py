"""The prompt of a decision model with a joint head: a state and a schema of questions, and where each part of
these stands. The source is encode_record of the published module (Cloudflare/clef), to the token: each piece
is encoded by itself.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from deltic.engine.messages import EngineInfo, JointQuestion, Request, SamplingParams
from deltic.server.chat.request import context_limit, text_ids
from deltic.server.errors import PromptTooLong, bad_request
from deltic.text import TRUSTED, Tokenizer

KINDS = ("noul", "choice", "score")
MAX_WORK = 1 << 24
"""The most options of a request, times the tokens of its prompt: each option looks at each token, and others
wait meanwhile. A head 1,024 wide of one layer of each kind takes 8 s of CPU time for it.
"""

_SYSTEM = (
    "Read the complete state and schema. Decide every field jointly. Each answer must be exactly one of that field's "
    "allowed options."
)
_BEFORE = f"{TRUSTED}<|im_start|>system\n{_SYSTEM}{TRUSTED}<|im_end|>\n{TRUSTED}<|im_start|>user\nSTATE:\n"
_BEHIND = f"\n{TRUSTED}<|im_end|>\n{TRUSTED}<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"


class JointAsked(Struct, frozen=True):
    """A question to a joint head."""

    name: str
    """The client's name of it, which the model sees."""
    kind: str
    """Kind of the question, of KINDS."""
    instruction: Any
    """A text, or any JSON; nothing: the name."""
    options: Sequence[tuple[str, Any]]
    """Options with their descriptions, in the order in which the model was trained to see them."""


def asked_noul(name: str, instruction: Any, criteria: Mapping[str, Any]) -> JointAsked:
    """A question of yes or no, whose options are `true` and `false`. criteria: what was said of these."""
    said = {
        "true": "The proposition is true or the answer is yes.",
        "false": "The proposition is false or the answer is no.",
    }
    return JointAsked(name, "noul", instruction, [*(said | dict(criteria)).items()])


def asked_choice(name: str, instruction: Any, criteria: Mapping[str, Any]) -> JointAsked:
    """A choice, whose options the model sees sorted by their names."""
    return JointAsked(name, "choice", instruction, sorted(criteria.items(), key=lambda option: option[0]))


def asked_score(name: str, instruction: Any, levels: Iterable[Any]) -> JointAsked:
    """A score, whose options are the numbers of its levels."""
    return JointAsked(name, "score", instruction, [(str(i), level) for i, level in enumerate(levels)])


def joint_request(tokenizer: Tokenizer, info: EngineInfo, state: Any, asked: Sequence[JointAsked]) -> Request:
    """The engine's request. Text of the client never becomes a special token. Raises ApiError (400) for a
    state that does not fit with its questions, of which none is left out, and for more than MAX_WORK.
    """
    ids, limit, field = tokenizer.encode(_BEFORE, "trusted"), context_limit(info), "state"

    def put(text: str) -> tuple[int, int]:
        begin = len(ids)
        ids.extend(text_ids(tokenizer, text, limit, field, begin))
        return begin, len(ids)

    put(_text(state))
    put("\n\nSCHEMA FIELDS:\n")
    questions = []
    for i, each in enumerate(asked):
        field = f"questions.{each.name}"
        put(f"\nFIELD {i + 1}\nID: {each.name}\nTYPE: {each.kind}\nINSTRUCTION: ")
        instruction = put(_text(each.name if each.instruction in (None, "") else each.instruction))
        put("\nALLOWED OPTIONS:\n")
        options = []
        for j, (option, about) in enumerate(each.options):
            put(f"OPTION {j + 1}: ")
            options.append(put(_text({"option_id": option} | ({} if about is None else {"description": about}))))
            put("\n")
        put("END FIELD\n")
        questions.append(JointQuestion(KINDS.index(each.kind), instruction, options))
    ids += tokenizer.encode(_BEHIND, "trusted")
    if len(ids) >= limit:
        raise PromptTooLong("state", len(ids), limit)
    n_options = sum(len(each.options) for each in asked)
    if (n_pairs := n_options * len(ids)) > MAX_WORK:
        message = (
            f"{n_options:,} options by {len(ids):,} tokens are {n_pairs:,} pairs of {MAX_WORK:,} that are allowed."
        )
        raise bad_request("questions", f"{message} Ask fewer questions at once, or shorten the state.")
    params = SamplingParams(max_tokens=0, temperature=0.0)
    return Request(id=f"decision-{secrets.token_hex(16)}", prompt_ids=ids, params=params, questions=questions)


def joint_logits(vector: bytes, asked: Sequence[JointAsked]) -> list[dict[str, float]]:
    """The logit of each option, by its name, for each question. vector: what the engine has answered."""
    logits = iter(array("f", vector))
    return [{name: next(logits) for name, _ in each.options} for each in asked]


def _text(value: Any) -> str:
    """A text as it is, and all else as JSON with sorted keys."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    )
