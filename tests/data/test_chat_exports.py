"""Exports of ChatGPT and Telegram."""

import json

import pytest

from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.records import read_records
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError


def node(role, *parts, kind="text", parent=None, **fields):
    """Return a node as ChatGPT exports it."""
    content = {"content_type": kind, "parts": list(parts)}
    message = {"author": {"role": role}, "content": content, "recipient": "all", "weight": 1.0, "metadata": {}}
    return {"message": {**message, **fields}, "parent": parent, "children": []}


def chain(*nodes):
    """Return a conversation of nodes, each the parent of the next, after an empty root."""
    mapping = {"root": {"id": "root", "message": None, "parent": None, "children": ["0"]}}
    for number, value in enumerate(nodes):
        mapping[str(number)] = {**value, "parent": str(number - 1) if number else "root"}
    return {"title": "a", "mapping": mapping, "current_node": str(len(nodes) - 1), "is_archived": False}


HIDDEN = {"metadata": {"is_visually_hidden_from_conversation": True}}
IMAGE = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://a"}


def contents(record):
    return [(message["role"], message["content"]) for message in json.loads(record.text or "{}").get("messages", [])]


def test_conversations_of_chatgpt(tmp_path):
    branches = chain(
        node("system", ""),
        node("system", "Be brief."),
        node("user", "profile", kind="user_editable_context"),
        node("user", "hidden", **HIDDEN),
        node("user", "2+2?"),
        node("assistant", kind="thoughts"),
        node("assistant", "weighs nothing", weight=0.0),
        node("assistant", "4", metadata={"model_slug": "gpt-4"}),
    )
    # An answer that was regenerated.
    branches["mapping"]["other"] = node("assistant", "5", parent="4")
    before = node("user", "q"), node("assistant", "a")
    breaks = [
        node("user", "Look.", IMAGE, kind="multimodal_text"),
        node("user", "Read.", metadata={"attachments": [{"name": "a.pdf"}]}),
        node("assistant", "search()", recipient="browser"),
        node("tool", "found"),
        node("assistant", "print(1)", kind="code"),
    ]
    cut = [chain(*before, one, node("user", "and?"), node("assistant", "later")) for one in breaks]
    silent = [chain(node("user", "q")), chain(breaks[0], before[1])]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([branches, *cut, *silent]), encoding="utf-8")
    first, *others = read_records([str(path)], Reading(kind=None))
    assert contents(first) == [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4")]
    assert [contents(record) for record in others] == [[("user", "q"), ("assistant", "a")]] * len(breaks)
    circle = chain(*before)
    circle["mapping"]["0"]["parent"] = "1"
    path.write_text(json.dumps([circle]), encoding="utf-8")
    (record,) = read_records([str(path)], Reading(kind=None))
    assert len(contents(record)) == len(circle["mapping"])
    damaged = {**circle, "mapping": {"1": 7}}
    path.write_text(json.dumps([branches, damaged]), encoding="utf-8")
    assert [contents(record) for record in read_records([str(path)], Reading(kind=None))] == [contents(first)]


def test_citations_of_chatgpt_are_the_links_that_it_shows(tmp_path):
    cite, entity = "\ue200cite\ue202turn0search3\ue201", '\ue200entity\ue202["city","Oslo"]\ue201'
    links = [
        {"matched_text": cite, "alt": "([a.org](https://a.org/b))"},
        {"matched_text": entity, "alt": "Oslo"},
        {"matched_text": " ", "alt": ""},
        {"matched_text": "【1†source】", "alt": None},
    ]
    answer = f"It is {entity} {cite}. Not {cite.replace('3', '4')}. Old 【1†source】【4†b.pdf】 marks【1†c】. 【n】 "
    question = node("user", "Where?")
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([chain(question, node("assistant", answer, metadata={"content_references": links}))]))
    (record,) = read_records([str(path)], Reading(kind=None))
    text = "It is Oslo ([a.org](https://a.org/b)). Not. Old marks. 【n】"
    assert contents(record) == [("user", "Where?"), ("assistant", text)]


def chat(*messages, kind="personal_chat", number=5):
    """Return a chat as Telegram Desktop exports it, of pairs of seconds and sender, and a text."""
    written = [
        {"id": place, "type": "message", "date_unixtime": str(10**9 + seconds), "from_id": f"user{sender}"}
        | (text if isinstance(text, dict) else {"text": text})
        for place, (seconds, sender, text) in enumerate(messages)
    ]
    return {"name": "A", "type": kind, "id": number, "messages": written}


CHAT = chat(
    (0, 5, "hi"),
    (1, 5, ["see ", {"type": "link", "text": "a.org"}, " now"]),
    (2, 9, {"text": "", "photo": "a.jpg"}),
    (3, 9, {"type": "service", "action": "phone_call", "text": ""}),
    (4, 9, {"text": "of another", "forwarded_from": "B"}),
    (5, 9, "yes"),
    (3605, 9, "nice"),
    (3606, 5, "bye"),
    # A new conversation, and one of one person only.
    (7207, 5, "back"),
    (7208, 9, "so"),
    (20000, 9, "anyone?"),
)
CONVERSATIONS = [
    [("user", "hi\nsee a.org now"), ("assistant", "yes\nnice"), ("user", "bye")],
    [("user", "back"), ("assistant", "so")],
]


@pytest.mark.parametrize("indent", [1, None])
def test_chats_of_telegram(tmp_path, indent):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(CHAT, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert [contents(record) for record in read_records([str(path)], Reading(kind=None))] == CONVERSATIONS
    group = chat((0, 5, "a"), (1, 9, "b"), kind="private_group")
    second = chat((0, 9, "you?"), (1, 6, "me"), number=6)
    whole = {"personal_information": {"user_id": 9}, "chats": {"about": "b", "list": [CHAT, group, second]}}
    path.write_text(json.dumps(whole, indent=indent), encoding="utf-8")
    expected = [*CONVERSATIONS, [("assistant", "you?"), ("user", "me")]]
    assert [contents(record) for record in read_records([str(path)], Reading(kind=None))] == expected
    assert len(load_documents([str(path)], Reading(kind="conversation", validation_fraction=0))[0]) == 3


@pytest.mark.parametrize(
    "odd",
    [7, None, {"text": 3}, {"text": [{"type": "link"}]}, {"text": "no time", "from_id": "user5"}, {"text": "a"}],
)
def test_an_odd_message_of_telegram_is_left_out(tmp_path, odd, caplog):
    path = tmp_path / "result.json"
    odder = {**CHAT, "messages": [*CHAT["messages"][:5], odd, *CHAT["messages"][5:]]}
    empty = {"type": "personal_chat", "id": 6}
    path.write_text(json.dumps({"chats": {"list": [7, {"type": "saved_messages"}, empty, odder]}}, indent=1))
    assert [contents(record) for record in read_records([str(path)], Reading(kind=None))] == CONVERSATIONS
    assert "1 messages of a chat of Telegram have another form, and are left out" in caplog.text


@pytest.mark.parametrize(
    "export",
    [
        chat((0, 5, "a"), (1, 9, "b"), kind="private_group"),
        chat((0, 5, "a"), (1, 9, {"text": "b", "date_unixtime": None})),
        {"chats": {"list": [7]}},
        {"chats": {}},
    ],
)
def test_exports_that_cannot_be_read(tmp_path, export):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(export, indent=1))
    with pytest.raises(UserError):
        list(read_records([str(path)], Reading(kind=None)))
