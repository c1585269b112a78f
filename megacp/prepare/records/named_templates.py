"""Chat templates that --chat-template knows by name, with generation blocks around what an assistant says."""

from __future__ import annotations

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message['role'] ~ '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] ~ '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] ~ '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
QWEN3 = """\
{%- set calls = '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n'
    ~ 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -%}
{%- set form = '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within '
    ~ '<tool_call></tool_call> XML tags:\\n<tool_call>\\n'
    ~ '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' -%}
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if system is not none -%}{{- system ~ '\\n\\n' -}}{%- endif -%}
    {{- calls -}}
    {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- form ~ '<|im_end|>\\n' -}}
{%- elif system is not none -%}
    {{- '<|im_start|>system\\n' ~ system ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- set asked = namespace(last=messages | length - 1, open=true) -%}
{%- for message in messages | reverse -%}
    {%- set words = message.content if message.content is string else none -%}
    {%- if asked.open and message.role == 'user' and words is not none
        and not (words.startswith('<tool_response>') and words.endswith('</tool_response>')) -%}
        {%- set asked.last = messages | length - 1 - loop.index0 -%}
        {%- set asked.open = false -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set words = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ words ~ '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set thought = '' -%}
        {%- if message.reasoning_content is string -%}
            {%- set thought = message.reasoning_content -%}
        {%- elif '</think>' in words -%}
            {%- set thought = words.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
            {%- set words = words.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
        {%- if loop.index0 > asked.last and (loop.last or thought) -%}
            {{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ words.lstrip('\\n') -}}
        {%- else -%}
            {{- words -}}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- if not loop.first or words -%}{{- '\\n' -}}{%- endif -%}
            {%- set call = call.function or call -%}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' -}}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' ~ words ~ '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
"""What Qwen3's own template writes. That one has no blocks, and shows the thoughts of the last answer alone: what
precedes an answer is then no prefix of the whole."""
OURS = {"chatml": CHATML, "qwen3": QWEN3}
"""Templates by name, for tokenizers without one and for those whose own does not say what is learned."""
