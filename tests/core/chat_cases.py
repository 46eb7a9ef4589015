"""What tests of chats share: a small tokenizer of bytes, templates in the manner of several models, and chats."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mouse_core.text.chat import ChatTemplate, Message

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "[INST]", "[/INST]"]

# Headers of roles, and a line's end behind every message.
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# Headers with two line ends, texts without spaces around them, and nothing behind the end of a turn.
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- set header = '<|start|>' ~ message.role ~ '<|end|>\\n\\n' %}
    {{- header ~ (message.content | trim) ~ '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}"""

# No generation prompt, and roles that have to take turns.
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant have to take turns') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Calls and results in brackets, tools before the last question, and no generation prompt.
BRACKETS = """{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}
            {{- '[TOOLS] ' ~ (tools | tojson) ~ '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ message.content ~ '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' ~ eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULTS] ' ~ ({'content': message.content, 'id': message.tool_call_id} | tojson) ~ '[/RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' ~ message.content ~ eos_token }}
    {%- endif %}
{%- endfor %}"""

# Tools, their calls and their answers; what is generated is said.
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
                {{- '<call>' ~ (said | tojson) ~ '</call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<answer>' ~ message.content ~ '</answer><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# Calls where nothing is said, and their arguments as they were written.
NOTHING_SAID = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'tool' %}{{- '[/INST]' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|start|>' }}
        {%- if message['content'] is none %}
            {%- for tool in message['tool_calls'] %}
                {{- '<s>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '<|eot|>' }}
            {%- endfor %}
            {{- eos_token }}
        {%- else %}
            {{- message['content'] + eos_token }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>' }}{%- endif %}"""

# What was thought before is taken out of all answers but the last.
FORGETFUL = """{%- for message in messages %}
    {%- set said = message.content if loop.last else message.content.split('</think>')[-1] %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ said ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The header of an answer stands there without a generation prompt.
HEADERS_ONLY = """{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}"""

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def said(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


TALK = (
    said("user", "who is there?"),
    said("assistant", "lettuce, naïve \U0001f96c"),
    said("user", "lettuce who?"),
    said("assistant", "lettuce in, it is cold"),
)

TOOL_TALK = (
    said("system", "be brief"),
    said("user", "cold in Łódź and here?"),
    said(
        "assistant",
        "one moment",
        tool_calls=[call("weather", {"city": "Łódź"}, id="a1"), call("weather", {"city": "here"}, id="a2")],
    ),
    said("tool", "-3°", tool_call_id="a1", name="weather"),
    said("tool", "21°", tool_call_id="a2", name="weather"),
    said("assistant", "there it is cold \U0001f976"),
)


@cache
def template(source: str, eos: str = "<|im_end|>") -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": eos})


@cache
def made() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [message["content"] for message in (*TALK, *TOOL_TALK)]
    tokenizer.train_from_iterator([*texts, "user assistant system weather name arguments city"], trainer)
    return str(tokenizer.to_str())


@cache
def tokenizer() -> Any:
    """A tokenizer that all tests share."""
    return fresh_tokenizer()


def fresh_tokenizer() -> Any:
    return Tokenizer.from_str(made())
