from pathlib import Path

from corerl.data.chat import readable
from tests.data.files import load, write

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}


def test_one_message_reads_as_it_is_and_several_with_their_roles() -> None:
    assert readable((USER,)) == "3+4?"
    assert readable((SYSTEM, USER)) == "system: Be brief.\nuser: 3+4?"


def test_with_chat_a_text_is_the_users_message_and_stays_the_prompts_text(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "3+4?"}', '{"prompt": "5+6?"}')
    plain, chat, told = load(path), load(path, chat=True), load(path, chat=True, system="Be brief.")
    assert (plain.chat, chat.chat) == (False, True)
    assert (plain.prompt(0).messages, chat.prompt(0).messages) == ((), (USER,))
    assert told.prompt(0).messages == (SYSTEM, USER)
    assert told.prompt(0).text == "3+4?"
    assert chat.train.tolist() == plain.train.tolist()


def test_a_chat_with_a_system_message_of_its_own_keeps_that(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        '{"prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "x"}]}',
        '{"prompt": [{"role": "user", "content": "x"}]}',
    )
    source = load(path, chat=True, system="Be brief.")
    assert [source.prompt(index).messages[0]["content"] for index in (0, 1)] == ["Own.", "Be brief."]
