"""Chats become texts as templates say, and masks have exactly the tokens that an assistant generated."""

import json
import pickle
import signal
from datetime import datetime, timedelta, tzinfo
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import ByteLevel, TemplateProcessing

from mouse_core import ConfigError, DataError
from mouse_core.text.chat import ChatTemplate, encode_chat, encode_preference, render_chat
from mouse_core.text.chat.encoding import renderer
from tests.core.chat_cases import (
    BRACKETS,
    CHATML,
    FORGETFUL,
    HEADERS_ONLY,
    LLAMA,
    MISTRAL,
    NOTHING_SAID,
    TALK,
    TOOL_TALK,
    TOOLS,
    WEATHER,
    call,
    fresh_tokenizer,
    said,
    template,
    tokenizer,
)

CALL = '<call>{"name": "weather", "arguments": {"city": "%s"}}</call>'
# Texts of a chat with tools, by hand: what is not an assistant's, and what is, by turns.
TOOL_PIECES = [
    "<|im_start|>system\nTools:\n"
    '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": '
    '{"type": "string"}}}}}<|im_end|>\n'
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ncold in Łódź and here?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "one moment" + CALL % "Łódź" + CALL % "here" + "<|im_end|>",
    "\n<|im_start|>user\n<answer>-3°</answer><|im_end|>\n<|im_start|>user\n<answer>21°</answer><|im_end|>\n"
    "<|im_start|>assistant\n",
    "there it is cold \U0001f976<|im_end|>",
    "\n",
]


def pieces(text: str, spans: tuple[tuple[int, int], ...]) -> list[str]:
    """What was generated, piece by piece."""
    return [text[start:end] for start, end in spans]


def test_a_chat_with_tools_token_by_token() -> None:
    found = encode_chat(template(TOOLS), TOOL_TALK, tokenizer(), tools=[WEATHER])
    assert found.rendered.text == "".join(TOOL_PIECES)
    # Each piece ends in a token of its own or in a line's end, so pieces may be tokenised apart.
    ids = [tokenizer().encode(piece).ids for piece in TOOL_PIECES]
    assert found.input_ids.tolist() == [one for piece in ids for one in piece]
    assert found.assistant_masks.tolist() == [place % 2 for place, piece in enumerate(ids) for _ in piece]


def test_a_chat_with_calls_in_brackets_token_by_token_and_cut() -> None:
    """Nothing is marked in the template, and nothing introduces an answer."""
    form = '{"name": "weather", "arguments": {"city": "%s"}, "id": "%s"}'
    tools = (
        '[TOOLS] [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string"}}}}}][/TOOLS]'
    )
    results = '[RESULTS] {"content": "-3°", "id": "a1"}[/RESULTS][RESULTS] {"content": "21°", "id": "a2"}[/RESULTS]'
    wanted = [
        f"<s>{tools}[INST] cold in Łódź and here?[/INST]",
        f"[CALLS] [{form % ('Łódź', 'a1')}, {form % ('here', 'a2')}]</s>",
        results,
        " there it is cold \U0001f976</s>",
    ]
    encoded = partial(encode_chat, template(BRACKETS, "</s>"), TOOL_TALK[1:], tokenizer(), tools=[WEATHER])
    found = encoded()
    assert found.rendered.text == "".join(wanted)
    ids = [tokenizer().encode(piece).ids for piece in wanted]
    flat, mask = [one for piece in ids for one in piece], [place % 2 for place, piece in enumerate(ids) for _ in piece]
    assert found.input_ids.tolist() == flat
    assert found.assistant_masks.tolist() == mask
    for length in (1, len(ids[0]) + 3, len(flat) - 3, len(flat), len(flat) + 9):
        for side, kept in (("right", slice(length)), ("left", slice(-length, None))):
            cut = encoded(max_length=length, truncation_side=side)
            assert cut.input_ids.tolist() == flat[kept]
            assert cut.assistant_masks.tolist() == mask[kept]


def test_calls_without_a_text_are_what_the_template_makes_of_them() -> None:
    """Templates in the manner of DeepSeek's ask whether there is a text, and write arguments as they are."""
    one = call("f", '{"a":1.0,"b":"\\u00e9"}')
    asked = {"role": "assistant", "tool_calls": [one, one], "refusal": None}  # as without a content
    talk = [said("user", "hi"), asked, said("tool", "r"), said("assistant", "done")]
    twice = 2 * ("<s>f\n" + '{"a":1.0,"b":"\\u00e9"}' + "<|eot|>")
    wanted = ["<s>", "[INST]hi", "<|start|>", twice + "</s>", "[/INST]r<|start|>", "done</s>"]
    found = encode_chat(template(NOTHING_SAID, "</s>"), talk, tokenizer())
    assert found.rendered.text == "".join(wanted)
    assert pieces(found.rendered.text, found.rendered.spans) == [wanted[3], wanted[5]]
    ids = [tokenizer().encode(piece).ids for piece in wanted]
    assert found.input_ids.tolist() == [one for piece in ids for one in piece]
    assert found.assistant_masks.tolist() == [int(n in (3, 5)) for n, piece in enumerate(ids) for _ in piece]
    with pytest.raises(DataError, match="can only concatenate str"):
        template(NOTHING_SAID).render([*TOOL_TALK[:2], said("assistant", None, tool_calls=[call("f", {"a": 1})])])


@pytest.mark.parametrize(
    ("source", "eos", "answers"),
    [
        (CHATML, "<|im_end|>", ["{}<|im_end|>", "{}<|im_end|>"]),
        (CHATML, "", ["{}<|im_end|>\n", "{}<|im_end|>\n"]),
        (LLAMA, "<|eot|>", ["{}<|eot|>", "{}<|eot|>"]),
        (MISTRAL, "</s>", [" {}</s>", " {}</s>"]),
    ],
)
def test_without_generation_blocks_answers_are_what_the_text_grew_by(source: str, eos: str, answers: list[str]) -> None:
    found = render_chat(template(source, "</s>"), TALK, end_of_turn=eos or "no end")
    texts = [message["content"] for message in TALK if message["role"] == "assistant"]
    assert pieces(found.text, found.spans) == [form.format(text) for form, text in zip(answers, texts, strict=True)]
    # The same spans, said by the template.
    if source is CHATML and eos:
        spoken = "'<|im_start|>' ~ message.role ~ '\\n'"
        marked = (
            "{% for message in messages %}{{ " + spoken + " }}{% if message.role == 'assistant' %}{% generation %}"
            "{{ message.content ~ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content ~ '<|im_end|>' }}"
            "{% endif %}{{ '\\n' }}{% endfor %}"
        )
        assert render_chat(template(marked), TALK) == found


def test_an_end_of_turn_within_an_answer_ends_it_only_where_the_template_writes_one() -> None:
    called = said("assistant", None, tool_calls=[call("f", {"a": "</s>x"})])
    for source, written in (("{}", ""), ("{}</s>", "</s>")):
        each = source.format("{{ m.content or m.tool_calls | tojson }}")
        made = template("{% for m in messages %}{{ '<' ~ m.role ~ '>' }}" + each + "{% endfor %}", "</s>")
        made = template(made.source + "{% if add_generation_prompt %}<assistant>{% endif %}", "</s>")
        for answer in (*(said("assistant", text) for text in ("a</s>b", "</s>", "b")), called):
            found = render_chat(made, (said("user", "</s>"), answer))
            (piece,) = pieces(found.text, found.spans)
            assert found.text == "<user></s>" + written + "<assistant>" + piece
            assert piece.endswith(written)


def test_what_cannot_be_told_is_refused_by_name() -> None:
    thinking = (*TALK[:1], said("assistant", "hm</think>me"), *TALK[2:])
    with pytest.raises(DataError, match=r"message 1: expected .* text that changes with later messages.*'hm</think>me"):
        render_chat(template(FORGETFUL), thinking)
    assert render_chat(template(FORGETFUL), TALK).spans  # nobody thought
    with pytest.raises(DataError, match=r"message 1: .* the header .* before the answer, but no gen"):
        render_chat(template(HEADERS_ONLY), TALK)
    with pytest.raises(DataError, match=r"message 0: .*have to take turns"):
        render_chat(template("{% if not messages %}{{ raise_exception('have to take turns') }}{% endif %}"), TALK[1:2])
    changed = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(DataError, match=r"expected unchanged text from \{% generation %\}"):
        render_chat(ChatTemplate(changed), TALK)


def test_generation_in_macros_and_in_what_is_captured() -> None:
    source = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% set text %}{{ m.role }}:{{ say(m) if m.role == 'assistant' else m.content }}"
        "{% endset %}{{ text }};{% endfor %}"
    )
    found = render_chat(ChatTemplate(source), TALK)
    assert pieces(found.text, found.spans) == [TALK[1]["content"], TALK[3]["content"]]


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=6), min_size=2, max_size=4),
    length=st.integers(1, 40),
    side=st.sampled_from(["left", "right"]),
)
def test_masks_are_cut_as_ids_are(texts: list[str], length: int, side: str) -> None:
    chat = [said(("user", "assistant")[place % 2], text) for place, text in enumerate(texts)]
    whole = encode_chat(template(CHATML), chat, tokenizer())
    # An oracle of its own: characters one by one.
    generated = {at for start, end in whole.rendered.spans for at in range(start, end)}
    wanted = [int(any(at in generated for at in range(a, b))) for a, b in whole.offsets.tolist()]
    assert whole.assistant_masks.tolist() == wanted
    answers = [f"{text}<|im_end|>" for text in texts[1::2]]
    assert pieces(whole.rendered.text, whole.rendered.spans) == answers
    cut = encode_chat(template(CHATML), chat, tokenizer(), max_length=length, truncation_side=side)
    kept = slice(length) if side == "right" else slice(-length, None)
    assert cut.input_ids.tolist() == whole.input_ids.tolist()[kept]
    assert cut.assistant_masks.tolist() == wanted[kept]


def test_tokens_at_an_edge() -> None:
    # " c" is one token of the tokenizer, whose first character is not the assistant's.
    source = ChatTemplate("{{ 'is ' }}{% generation %}{{ 'cold' }}{% endgeneration %}")
    chat = encode_chat(source, TALK, tokenizer())
    assert sum(start < 3 < end for start, end in chat.offsets.tolist()) == 1
    assert chat.assistant_masks.tolist() == [int(end > 3) for _, end in chat.offsets.tolist()]
    # All bytes of a character are of one kind.
    crab = "\U0001f980"
    chat = encode_chat(template(CHATML), (said("user", crab), said("assistant", crab)), tokenizer())
    text = chat.rendered.text
    spots = [place for place, (a, b) in enumerate(chat.offsets.tolist()) if text[a:b] == crab]
    each = len(tokenizer().encode(crab).ids)
    assert each > 1
    assert chat.assistant_masks[spots].tolist() == [0] * each + [1] * each
    # White space that a tokenizer trims off its offsets counts.
    trims = fresh_tokenizer()
    trims.post_processor = ByteLevel(trim_offsets=True)
    talk = (said("user", " \n "), said("assistant", "is  \n it \n cold  "), said("user", "  "))
    found, wanted = (encode_chat(template(CHATML), talk, one) for one in (trims, tokenizer()))
    assert found.input_ids.tolist() == wanted.input_ids.tolist()
    assert found.assistant_masks.tolist() == wanted.assistant_masks.tolist()


def test_settings_and_special_tokens_of_the_tokenizer_do_not_count() -> None:
    busy = fresh_tokenizer()
    busy.enable_truncation(3)
    busy.enable_padding(length=50)
    busy.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    plain = encode_chat(template(CHATML), TALK, tokenizer())
    assert encode_chat(template(CHATML), TALK, busy).input_ids.tolist() == plain.input_ids.tolist()
    assert busy.truncation is not None
    with pytest.raises(ConfigError, match="which return offsets, found function"):
        encode_chat(template(CHATML), TALK, lambda text: [1])
    with pytest.raises(DataError, match="expected Unicode characters, found half a surrogate pair at "):
        encode_chat(template(CHATML), (said("user", "a\ud83e"),), tokenizer())


BIG = "{% set b = namespace(s='a' * 999999) %}{% for i in range(2) %}{% set b.s = b.s ~ b.s %}{% endfor %}"
SLOW = {
    "filters": BIG + "{% for i in range(99999) %}{% set x = b.s | upper %}{% endfor %}",
    "tests": BIG + "{{ range(99999) | map('string') | select('in', b.s ~ '0') | list | length }}",
    "methods": BIG + "{% for i in range(99999) %}{% set x = b.s.count('b') %}{% endfor %}",
    "slices": BIG + "{% set x = b.s[1:] %}" * 500,
    "comparisons": BIG + "{{ 'ab' in b.s }}" * 500,
}


def test_templates_that_take_long_are_stopped() -> None:
    for source in SLOW.values():
        with pytest.raises(DataError, match="expected a text within max_seconds"):
            ChatTemplate(source, max_seconds=0.01).render(TALK)
    with pytest.raises(ConfigError, match="max_seconds: expected a number above 0"):
        ChatTemplate("", max_seconds=0)


class Late(Exception):
    """The error of a signal's handler."""


def test_an_interrupted_rendering_gives_its_text_to_nobody() -> None:
    def stop(*_: object) -> None:
        raise Late

    loops = "{% for i in range(400) %}{% for j in range(1000) %}{% endfor %}{% endfor %}slow"
    slow, fast = ChatTemplate(loops, max_seconds=60), ChatTemplate("fast")
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Late):
            slow.render(TALK)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [fast.render(TALK), slow.render(TALK), fast.render(TALK)] == ["fast", "slow", "fast"]


def test_who_kills_the_idle_renderer_is_not_noticed() -> None:
    template = ChatTemplate("text")
    child = renderer.child
    assert child is not None
    child._process.send_signal(signal.SIGTERM)  # SIGINT may be ignored, as in a background job of a shell
    child._process.wait()
    assert template.render(TALK) == "text"


def test_times_of_any_zone_and_numbers_of_any_size() -> None:
    methods = {"utcoffset": timedelta(hours=-3), "tzname": "XX", "dst": None}
    zone = type("Zone", (tzinfo,), {name: lambda *_, value=value: value for name, value in methods.items()})
    now = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=zone())  # of a class that no other process has
    form = "%Y-%m-%d %H:%M:%S.%f %Z %z"
    assert ChatTemplate("{{ strftime_now(form) }}", {"form": form}, now=now).render(TALK) == now.strftime(form)
    assert ChatTemplate("text", max_seconds=float("inf")).render(TALK) == "text"
    with pytest.raises(DataError, match="chat template: expected values of JSON, found"):
        ChatTemplate("{{ large }}", {"large": 10**6000}).render(TALK)


def test_limits_do_not_change_what_is_small() -> None:
    source = (
        "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m.content | replace('e', 'E')] %}"
        "{% endfor %}{{ n.l | join(';') }}|{{ ', '.join(n.l[:1]) }}|{{ 'a\\nb' | indent(2) }}|{{ [1, (2, 3)] }}|"
        "{{ '{\"a\": {\"b\": %s}}' % 7 }}|{{ '{0}{{}}{0:>3}'.format('x') }}|{{ '%05.1f%%' | format(2.5) }}|"
        "{{ {'a': [1]} | tojson(indent=1) }}|{{ messages | map(attribute='role') | unique | list | length }}"
    )
    joined = "who is thErE?;lEttucE, naïvE \U0001f96c;lEttucE who?;lEttucE in, it is cold"
    wanted = [joined, "who is thErE?", "a\n  b", "[1, (2, 3)]", '{"a": {"b": 7}}', "x{}  x", "002.5%"]
    assert ChatTemplate(source).render(TALK).split("|") == [*wanted, '{\n "a": [\n  1\n ]\n}', "2"]


def test_templates_have_what_those_of_others_use() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content[:3] }}|{% endfor %}\n"
        "{{ {'ä': '<b>'} | tojson }} {{ strftime_now('%Y') }} {{ documents[0].title }} {{ bos_token }}\n"
        "    {% if tools is none %}\n none{% endif %}"
    )
    made = ChatTemplate(source, {"bos_token": "<s>", "documents": [{"title": "t"}]}, now=datetime(2001, 2, 3))
    text = made.render(TALK)
    assert text == 'who|let|let|{"ä": "<b>"} 2001 t <s>\n none'
    assert pickle.loads(pickle.dumps(made)).render(TALK) == text
    with pytest.raises(DataError, match="raised an error for this chat: user and assistant have to take turns"):
        template(MISTRAL).render(TALK[1:])
    with pytest.raises(ConfigError, match="found in line 2"):
        ChatTemplate("\n{% for %}")
    with pytest.raises(DataError, match="expected one or more messages"):
        made.render([])


def test_the_template_of_a_tokenizer_has_its_special_tokens() -> None:
    several = [{"name": "default", "template": "{{ eos_token }}"}, {"name": "tools", "template": "{{ tools }}"}]
    special = {"eos_token": "</s>", "additional_special_tokens": ["<x>"]}
    for source, name in (("{{ eos_token }}", "default"), (several, "default"), ({"other": "{{ eos_token }}"}, "other")):
        found = ChatTemplate.of(SimpleNamespace(chat_template=source, special_tokens_map=special), name=name)
        assert found.render(TALK) == "</s>"
        assert list(found.variables) == ["eos_token"]
    with pytest.raises(ConfigError, match="expected a chat template 'other' in the tokenizer, found none"):
        ChatTemplate.of(SimpleNamespace(chat_template=several), name="other")


def test_templates_receive_messages_as_they_are() -> None:
    shown = ChatTemplate("{{ messages | tojson }}")
    for message in (
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "high"}, "id": 3}]},
        {"role": "user", "content": [{"type": "image", "url": "a.png"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"a":1}'}]},
        {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call("f", {"a": 1}, id="1")]},
    ):
        assert shown.render([{**message, "nothing": None}]) == json.dumps([message], ensure_ascii=False)
    for wrong, message in (
        ([{"content": "x"}], "message 0: expected a dict with a role"),
        ([said("user", "x"), 3], "message 1: expected a dict with a role"),
        ([{"role": "user", "content": 3}], "message 0: expected content as a str"),
        ([{"role": "user", "content": ["x"]}], "message 0: expected content as a str or a list of parts"),
        ([{"role": "user", "tool_calls": [3]}], "message 0: expected tool_calls as a list of dicts"),
        ([{"role": "user", "other": {1}}], "message 0: expected values of JSON"),
        ("text", "one or more messages"),
    ):
        with pytest.raises(DataError, match=message):
            shown.render(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [CHATML, TOOLS])
def test_answers_of_no_weight_are_not_learned(source: str) -> None:
    talk = [dict(message) for message in TALK]
    places = [place for place, message in enumerate(talk) if message["role"] == "assistant"]
    whole = encode_chat(template(source), talk, tokenizer())
    for weights in ((0, 1), (1, 0), (0, 0), (1, 1)):
        for place, weight in zip(places, weights, strict=True):
            talk[place]["weight"] = weight
        found = encode_chat(template(source), talk, tokenizer())
        kept = [span for span, weight in zip(whole.rendered.spans, weights, strict=True) if weight]
        assert (found.rendered.text, list(found.rendered.spans)) == (whole.rendered.text, kept)
    twice = ChatTemplate("{% for m in messages %}{% generation %}a{% endgeneration %};{% endfor %}")
    with pytest.raises(DataError, match=r"expected 2 blocks .* as some messages have weight 0, found 4 blocks"):
        encode_chat(twice, [{**one, "weight": 0} for one in talk], tokenizer())


def test_a_preference_is_a_prompt_and_what_follows() -> None:
    made = encode_preference(template(LLAMA, "<|eot|>"), TALK[:1], TALK[1:2], TALK[3:], tokenizer())
    prompt = "<s><|start|>user<|end|>\n\nwho is there?<|eot|><|start|>assistant<|end|>\n\n"
    texts = {"prompt": prompt, "chosen": f"{TALK[1]['content']}<|eot|>", "rejected": f"{TALK[3]['content']}<|eot|>"}
    assert {name: ids.tolist() for name, ids in made.items()} == {
        f"{name}_ids": tokenizer().encode(text).ids for name, text in texts.items()
    }
    with pytest.raises(DataError, match="chosen: expected a text that begins with the text of the prompt"):
        encode_preference(template("{{ messages | length }}"), TALK[:1], TALK[1:2], TALK[3:], tokenizer())
