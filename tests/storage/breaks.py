"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/storage/cache.py", "tests/storage/test_cache.py"): [
        ("stated == _hashes(kept / _FILES)", "True", "what is in the cache is believed"),
        ("files.sync_below(made)", "pass", "a folder has its name before its files are on disk"),
        (
            "        if not _is_whole(kept):",
            "        if not kept.exists():",
            "a damaged folder stays for ever",
        ),
    ],
    ("megacp/storage/wording.py", "tests/storage/test_wording.py"): [
        ("    return escaped(text)", "    return text", "a name steers the terminal"),
        (
            "_LONG_WORD.sub(lambda found: _without_middle(found[0], _WORD), text)",
            "text",
            "a name of 10 MB is shown",
        ),
        ("\\u2028-\\u202e", "\\u2028-\\u2029", "a name turns the direction of a message"),
    ],
    ("megacp/storage/hub.py", "tests/storage/test_hub.py"): [
        ("if not is_hub_name(name):", "if True:", "a name of the hub gets no download command"),
        (" and not Path(text).exists()", "", "an existing folder is a name of the hub"),
    ],
    ("megacp/engine/config/cli.py", "tests/storage/test_wording.py"): [
        (
            "_print_message(for_terminal(message), file)",
            "_print_message(message, file)",
            "a flag steers the terminal",
        ),
    ],
    ("megacp/storage/url.py", "tests/storage/test_web.py"): [
        ("begin + _ANSWER_SECONDS +", "begin + 1e9 +", "a server sends a byte per second for ever"),
        (" + content.tell() / _LEAST_RATE", "", "a large file of a slow line is refused"),
        (
            "and (match is None or match[1] not in _WEB)",
            "",
            "an IPv6 address is taken for a chain of URLs",
        ),
        (
            "return outcome.result(seconds)",
            "return outcome.result()",
            "a store that does not answer is waited for",
        ),
        ('"response_class": _bounded_response(),', "", "an index page fills the memory"),
    ],
}
