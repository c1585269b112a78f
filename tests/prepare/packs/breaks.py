"""Mistakes that the tests in this folder must detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/packs/packing.py", "tests/prepare/packs/test_packing.py"): [
        (
            "min(len(available), -(-remaining // each))",
            "len(available)",
            "more packs are filled than there are items left",
        ),
        (
            '-lengths, kind="stable"',
            'lengths, kind="stable"',
            "the shortest items are packed first",
        ),
        (
            "(start + longest, lengths[document])",
            "(start + longest, start + longest)",
            "the last piece is too long",
        ),
        ("[: opened + 1] >= need_crops", "[: opened + 1] >= 0", "the second budget is ignored"),
    ],
    ("megacp/prepare/packs/unit.py", "tests/prepare/packs/test_answer_forms.py"): [
        (
            "self._forms.update(entry.forms)",
            "pass",
            "the forms of learned answers are not counted",
        ),
    ],
    ("megacp/prepare/packs/run.py", "tests/prepare/packs/test_answer_forms.py"): [
        (
            "if forms[AS_MESSAGES] and forms[ALPACA]:",
            "if False:",
            "a dataset has answers in two forms",
        ),
    ],
    ("megacp/prepare/records/forms.py", "tests/prepare/packs/test_answer_forms.py"): [
        (
            "not (has_template or rules.form == AS_MESSAGES)",
            "True",
            "a template does not write Alpaca's records",
        ),
    ],
    ("megacp/prepare/records/sample.py", "tests/prepare/packs/test_answer_forms.py"): [
        (
            "if not is_read and value not in",
            "if False and value not in",
            "a variable that no template reads is lost",
        ),
    ],
    ("megacp/prepare/records/read.py", "tests/prepare/packs/test_run.py"): [
        (
            "or extent.start < self._offset:",
            "or True:",
            "each unit counts lines from the file's first byte",
        ),
    ],
    ("megacp/prepare/packs/unit.py", "tests/prepare/packs/test_folders.py"): [
        (
            "document.weights[start:stop]",
            "document.weights[: stop - start]",
            "all pieces get the weights of the first",
        ),
        (
            "(place.extent) + place.line",
            "(place.extent) + 1",
            "every reject is reported in the first line of its unit",
        ),
    ],
    ("megacp/prepare/media/reader.py", "tests/prepare/packs/test_urls.py"): [
        (
            "if (top.scheme, top.host, top.port) == server",
            "",
            "a redirect to another host is followed",
        ),
        (
            "if not url.raw_path.startswith(inside) or",
            "if",
            "a redirect out of the folder is followed",
        ),
        ("        path = plain\n", "        return False\n", "escaped dots are not recognised"),
    ],
    ("megacp/storage/url.py", "tests/prepare/packs/test_urls.py"): [
        ('"auto_decompress": False,', "", "a small response is decompressed to a large one"),
        ("[url.guard] if url.guard else []", "[]", "the target of a redirect is not checked"),
    ],
    ("megacp/prepare/media/reader.py", "tests/prepare/packs/test_qwen_images.py"): [
        (
            "(begin + shift, end + shift, weight)",
            "(begin, end, weight)",
            "learned ranges do not move after a video",
        ),
    ],
    ("megacp/training/data/images.py", "tests/prepare/packs/test_qwen_images.py"): [
        ("- step - ended", "- step", "a branch continues the positions of its sibling"),
        ("= grids.max(1)", "= grids[:, 0]", "text positions continue inside a wide image"),
        ("within // columns", "within % columns", "rows count columns"),
        ("units.grids[mine]", "units.grids", "a rank has the grids of all ranks"),
    ],
    ("megacp/training/data/vision/decoding.py", "tests/prepare/packs/test_qwen_images.py"): [
        (
            "known.get(i, known[first])",
            "known.get(i, 0 * known[first])",
            "an incomplete pair is filled with black",
        ),
    ],
    ("megacp/prepare/packs/writer.py", "tests/prepare/packs/test_qwen_images.py"): [
        (
            "_GRID_ROW.pack(*unit.grid)",
            "_GRID_ROW.pack(*unit.grid[::-1])",
            "grids are stored with height and width swapped",
        ),
    ],
}
