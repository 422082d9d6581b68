from __future__ import annotations

import pytest

from corerl.data.prompts import Prompt
from corerl.testing.episodes import scripted

PROMPT = Prompt(index=0, text="2+3=", answer="5")


def test_a_script_answers_one_request_after_the_other_and_records_them() -> None:
    with scripted(PROMPT, ["one", "two"]) as script:
        messages = script.episode.messages
        messages.append(script.episode.chat(messages)["message"])
        messages.append({"role": "user", "content": "and?"})
        assert script.episode.chat(messages)["message"]["content"] == "two"
        with pytest.raises(RuntimeError, match="the script has only 2 answers, but one more was requested"):
            script.episode.chat([*messages, {"role": "assistant", "content": "two"}, {"role": "user", "content": "?"}])
    assert script.asked[:2] == [["2+3="], ["2+3=", "one", "and?"]]


def test_a_script_refuses_a_request_that_a_run_would_refuse() -> None:
    with scripted(PROMPT, ["one", "two"]) as script:
        messages = script.episode.messages
        messages.append(script.episode.chat(messages)["message"])
        with pytest.raises(RuntimeError, match="got 2, but the episode already has 2, including its last answer"):
            script.episode.chat(messages)
        changed = [{"role": "user", "content": "2+4="}, messages[1], {"role": "user", "content": "and?"}]
        with pytest.raises(RuntimeError, match=r"messages\[0\].content: got '2\+4=', but the episode has '2\+3='"):
            script.episode.chat(changed)
    assert script.asked == [["2+3="]]


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("Observation:", "I look.\n"),
        (["!", "look"], "I "),
        ("?", "I look.\nObservation: x"),
        ([], "I look.\nObservation: x"),
    ],
)
def test_a_scripted_answer_ends_before_a_stop_text_of_its_request(stop: object, said: str) -> None:
    with scripted(PROMPT, ["I look.\nObservation: x"]) as script:
        choice = script.episode.chat(script.episode.messages, stop=stop)
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
