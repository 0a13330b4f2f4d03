"""Loss masks by template family: the supervised text of hand-written conversations, written out."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from data_tools import FAMILIES, SPECIAL, TEMPLATES, chat, reasons, run, supervised, text_of, write_jsonl, write_target
from draftsmith.data.conversations import Conversation, RowRules, parse_row
from draftsmith.data.mask import Masker
from draftsmith.data.shards import Corpus
from draftsmith.data.template import ChatTemplate, load_text_side, load_tokenizer
from draftsmith.data.tools import Rejection

TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
PLAIN = {
    "messages": [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hi! How are you?"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "It is four."},
    ]
}
SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, *PLAIN["messages"]]}
REASONED = {
    "messages": [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hi!"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "reasoning_content": "Add them.", "content": "It is four."},
    ]
}
INLINE = {
    "messages": [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHi!"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nAdd them.\n</think>\n\nIt is four."},
    ]
}
TOOLS = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ],
}  # fmt: skip
BOX = "<｜end▁of▁sentence｜>"
FINAL = "<|channel|>final<|message|>"

# family, template options, row -> supervised text, turn by turn
EXPECTED: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("chatml", {}, PLAIN, ["Hi! How are you?<|im_end|>", "It is four.<|im_end|>"]),
    ("chatml", {}, SYSTEM, ["Hi! How are you?<|im_end|>", "It is four.<|im_end|>"]),
    ("chatml", {}, TOOLS, [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "It is sunny.<|im_end|>",
    ]),
    ("qwen3", {}, PLAIN, ["Hi! How are you?<|im_end|>", "<think>\n\n</think>\n\nIt is four.<|im_end|>"]),
    ("qwen3", {}, REASONED, ["Hi!<|im_end|>", "<think>\nAdd them.\n</think>\n\nIt is four.<|im_end|>"]),
    ("qwen3", {}, INLINE, ["Hi!<|im_end|>", "<think>\nAdd them.\n</think>\n\nIt is four.<|im_end|>"]),
    ("qwen3", {"enable_thinking": False}, PLAIN, ["Hi! How are you?<|im_end|>", "It is four.<|im_end|>"]),
    ("qwen3", {"enable_thinking": False}, TOOLS, [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "It is sunny.<|im_end|>",
    ]),
    ("llama3", {"date_string": "26 Jul 2024"}, SYSTEM, ["Hi! How are you?<|eot_id|>", "It is four.<|eot_id|>"]),
    ("llama3", {}, TOOLS, ['{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>', "It is sunny.<|eot_id|>"]),
    ("gemma", {}, SYSTEM, ["Hi! How are you?<end_of_turn>", "It is four.<end_of_turn>"]),
    ("mistral", {}, PLAIN, [" Hi! How are you?</s>", " It is four.</s>"]),
    ("mistral", {}, SYSTEM, [" It is four.</s>"]),  # its system prompt is shown before the last question alone
    ("mistral", {}, TOOLS, [
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]</s>', " It is sunny.</s>",
    ]),
    ("phi", {}, SYSTEM, ["Hi! How are you?<|end|>", "It is four.<|end|>"]),
    ("deepseek_r1", {}, PLAIN, [f"Hi! How are you?{BOX}", f"It is four.{BOX}"]),
    ("deepseek_r1", {}, INLINE, [f"\n\nHi!{BOX}", f"\n\nIt is four.{BOX}"]),
    ("harmony", {}, PLAIN, [f"{FINAL}Hi! How are you?<|end|>", f"{FINAL}It is four.<|return|>"]),
    ("harmony", {}, REASONED, [
        f"{FINAL}Hi!<|end|>",
        f"<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant{FINAL}It is four.<|return|>",
    ]),
    ("harmony", {}, TOOLS, [
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        f"{FINAL}It is sunny.<|return|>",
    ]),
    ("glm", {}, PLAIN, ["\n<think></think>\nHi! How are you?<|user|>", "\n<think></think>\nIt is four."]),
    ("glm", {}, REASONED, ["\n<think>A greeting.</think>\nHi!<|user|>", "\n<think>Add them.</think>\nIt is four."]),
    ("glm", {"enable_thinking": False}, PLAIN, ["\nHi! How are you?<|user|>", "\nIt is four."]),
    ("glm", {}, TOOLS, [
        "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
        "<|observation|>",
        "\n<think></think>\nIt is sunny.",
    ]),
    ("tagged", {}, PLAIN, ["Hi! How are you?<|im_end|>", "It is four.<|im_end|>"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {family: write_target(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize(("family", "options", "row", "expected"), EXPECTED)
def test_supervised_text(family, options, row, expected, targets, tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [row])
    run(targets[family], tmp_path / "out", source, template_options=options)
    assert supervised(Corpus.open(tmp_path / "out", "train"), 0) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_what_transformers_renders(family, targets):
    """Our compiled template gives transformers' text, with and without the generation prompt."""
    side = load_text_side(targets[family], now="2024-07-26T00:00:00", template_options={"date_string": "26 Jul 2024"})
    tokenizer, template = load_tokenizer(targets[family]), ChatTemplate(side)
    for row in (PLAIN, TOOLS):
        if family == "gemma" and row is TOOLS:
            continue  # it refuses tool turns
        parsed = parse_row(row, RowRules())
        for prompt in (False, True):
            theirs = tokenizer.apply_chat_template(
                parsed.messages,
                tools=parsed.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                date_string="26 Jul 2024",
            )
            assert template.render(parsed.messages, parsed.tools, prompt) == theirs


def test_generation_tags_give_the_mask_of_transformers(targets):
    tokenizer = load_tokenizer(targets["tagged"])
    theirs = tokenizer.apply_chat_template(PLAIN["messages"], return_dict=True, return_assistant_tokens_mask=True)
    from draftsmith.data.encode import Encoder

    side = load_text_side(targets["tagged"])
    (document,) = Encoder(side).encode([Masker(side).render(parse_row(PLAIN, RowRules()))])
    assert document.tokens.tolist() == theirs["input_ids"]
    assert document.mask.tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral"])
def test_marks_agree_with_every_prefix(family, targets):
    """The two-renderings proof finds what rendering every prefix finds, on conversations of odd texts."""
    rng = random.Random(family)
    side = load_text_side(targets[family], now="2024-07-26T00:00:00")
    masker = Masker(side)
    pieces = ["hello", " ", "\n", "{", '"', "é", "🙂", "the end", "assistant\n", "|", "\t", "<", "user", "[", "a b c "]
    for _ in range(60):
        texts = ["".join(rng.choices(pieces, k=rng.randint(1, 8))) for _ in range(2 * rng.randint(1, 4))]
        texts = [text if text.strip() else "x" for text in texts]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        parsed = parse_row({"messages": messages}, RowRules())
        rendered = masker.render(parsed)
        assert rendered.text == ChatTemplate(side).render(messages, None)
        assert rendered.spans == masker._every_prefix(rendered.text, messages, parsed)


def test_marks_survive_outer_whitespace(targets):
    """Templates that trim texts and templates that keep them: the reply's own whitespace is the reply's."""
    row = chat(" \n Hello\n", "\n\n  Fine.  \n")
    for family, expected in (("chatml", "\n\n  Fine.  \n<|im_end|>"), ("llama3", "Fine.<|eot_id|>")):
        side = load_text_side(targets[family], now="2024-07-26T00:00:00")
        rendered = Masker(side).render(parse_row(row, RowRules()))
        assert [rendered.text[a:b] for a, b in rendered.spans] == [expected]


def test_token_across_the_prompts_end_is_cut(targets, tmp_path):
    """A reply that begins with a line break would share a token with the prompt's last: it is tokenised apart."""
    run(targets["chatml"], tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [chat("Hello", "\nFine.")]))
    corpus = Corpus.open(tmp_path / "out", "train")
    assert supervised(corpus, 0) == ["\nFine.<|im_end|>"]
    assert text_of(corpus, 0).endswith("<|im_start|>assistant\n\nFine.<|im_end|>\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_texts_stay_text(family, targets, tmp_path):
    """Every special token's text in a user turn and in a reply: no control token that the template did not write."""
    clean = chat("Say: x", "Well: x")
    noisy = chat(f"Say: {' '.join(SPECIAL)}", f"Well: {''.join(SPECIAL)}")
    run(targets[family], tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [clean, noisy]), max_tokens=9999)
    corpus = Corpus.open(tmp_path / "out", "train")
    tokenizer = load_tokenizer(targets[family])
    control = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    found = [[t for t in corpus.document(i)[0].tolist() if t in control] for i in range(2)]
    assert found[0] == found[1]
    assert "".join(SPECIAL) in text_of(corpus, 1)  # and the text is all there
    assert "".join(SPECIAL) in supervised(corpus, 1)[0]


def test_special_tokens_in_tools_stay_text(targets, tmp_path):
    row = json.loads(json.dumps(TOOLS).replace("sunny", "sunny<|im_end|>").replace('"d"', '"<|im_start|>"'))
    run(targets["chatml"], tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [row, TOOLS]))
    corpus = Corpus.open(tmp_path / "out", "train")
    ends = load_tokenizer(targets["chatml"]).convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    counts = [[corpus.document(i)[0].tolist().count(end) for end in ends] for i in range(2)]
    assert counts[0] == counts[1]


def test_reasoning_may_be_masked_or_dropped(targets, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [REASONED, INLINE])
    run(targets["qwen3"], tmp_path / "masked", source, reasoning="mask")
    corpus = Corpus.open(tmp_path / "masked", "train")
    for i in range(2):
        assert supervised(corpus, i) == ["Hi!<|im_end|>", "It is four.<|im_end|>"]
        assert "Add them." in text_of(corpus, i)
    run(targets["qwen3"], tmp_path / "dropped", source, reasoning="drop")
    assert "Add them." not in text_of(Corpus.open(tmp_path / "dropped", "train"), 0)
    assert "Add them." not in text_of(Corpus.open(tmp_path / "dropped", "train"), 1)


def test_last_turn_only_and_weights(targets, tmp_path):
    weighted = json.loads(json.dumps(PLAIN))
    weighted["messages"][1]["weight"] = 0
    run(targets["chatml"], tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [weighted]))
    assert supervised(Corpus.open(tmp_path / "out", "train"), 0) == ["It is four.<|im_end|>"]
    run(targets["chatml"], tmp_path / "last", write_jsonl(tmp_path / "b.jsonl", [PLAIN]), last_turn_only=True)
    assert supervised(Corpus.open(tmp_path / "last", "train"), 0) == ["It is four.<|im_end|>"]


def test_leading_assistant(targets, tmp_path):
    """Rendered but not trained on; refused where the template refuses it; dropped on request."""
    row = {"messages": [{"role": "assistant", "content": "Welcome, friend."}, *PLAIN["messages"]]}
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    for family in ("chatml", "phi"):
        run(targets[family], tmp_path / family, source)
        corpus = Corpus.open(tmp_path / family, "train")
        assert "Welcome, friend." in text_of(corpus, 0)
        assert supervised(corpus, 0)[0].startswith("Hi! How are you?")
    run(targets["gemma"], tmp_path / "skipped", source, skip_leading_assistant=True)
    assert supervised(Corpus.open(tmp_path / "skipped", "train"), 0)[0] == "Hi! How are you?<end_of_turn>"
    run(targets["gemma"], tmp_path / "refused", write_jsonl(tmp_path / "b.jsonl", [row, PLAIN]))
    assert reasons(tmp_path / "refused") == [(1, "template-error")]


LYING = {
    "counts the turns": "{% for m in messages %}[{{ messages | length }}]{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[{{ messages | length }}]assistant: {% endif %}",
    "repeats the reply": "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "another prompt": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}model: {% endif %}",
    "reply first": "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "length of the text": "{% for m in messages %}{{ m.role }} ({{ m.content | length + messages | length }}): "
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant (?): {% endif %}",
    "leaves replies out": "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}",
}


@pytest.mark.parametrize("name", LYING)
def test_rows_without_proof_are_refused(name, targets, tmp_path):
    """Templates whose whole text does not begin with the prompt that a server renders."""
    (tmp_path / "lying.jinja").write_text(LYING[name])
    side = load_text_side(targets["chatml"], tmp_path / "lying.jinja")
    with pytest.raises(Rejection, match="mask-not-proved"):
        Masker(side).render(parse_row(PLAIN, RowRules()))


def test_template_that_looks_at_what_marks_change_is_still_proved(targets, tmp_path):
    """Marks lengthen texts; a template that shows the length is proved by rendering every prefix."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}({{ m.content | length }}) {% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "length.jinja").write_text(template)
    run(
        targets["chatml"], tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [PLAIN, chat("a <|im_end|>", "b c d")]),
        chat_template=tmp_path / "length.jinja",
    )  # fmt: skip
    assert supervised(Corpus.open(tmp_path / "out", "train"), 0) == [
        "Hi! How are you?<|im_end|>",
        "It is four.<|im_end|>",
    ]
    assert reasons(tmp_path / "out") == [(2, "special-token-text")]


def test_renderings_grow_linearly_with_turns(targets):
    """40 turns take as many renderings as one: no rendering of every prefix."""
    masker = Masker(load_text_side(targets["chatml"]))
    for turns in (2, 40):
        conversation = Conversation([m for _ in range(turns) for m in chat()["messages"]], None, [False, True] * turns)
        masker.render(conversation)  # learns what this template puts between messages
        calls = []
        masker._plain = Counting(masker._plain, calls)
        masker._tagged = Counting(masker._tagged, calls)
        masker.render(conversation)
        assert len(calls) == 3
        masker._plain, masker._tagged = masker._plain.template, masker._tagged.template


class Counting:
    """A template that counts its renderings."""

    def __init__(self, template: ChatTemplate, calls: list[int]):
        self.template, self.calls = template, calls

    def render(self, *arguments: Any, **named: Any) -> str:
        self.calls.append(1)
        return self.template.render(*arguments, **named)


def test_every_family_has_its_template():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
