"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/packs/packing.py", "tests/prepare/packs/test_packing.py"): [
        (
            "min(len(available), -(-remaining // each))",
            "len(available)",
            "more packs are taken than items are left",
        ),
        (
            '-lengths, kind="stable"',
            'lengths, kind="stable"',
            "the shortest first",
        ),
        (
            "(start + longest, lengths[document])",
            "(start + longest, start + longest)",
            "the last piece is too long",
        ),
        ("[: opened + 1] >= need_crops", "[: opened + 1] >= 0", "the second budget does not count"),
    ],
    ("megacp/prepare/packs/unit.py", "tests/prepare/packs/test_answer_forms.py"): [
        (
            "self._forms.update(entry.forms)",
            "pass",
            "nobody knows in which form answers are learned",
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
            "all pieces are learned as the first",
        ),
        (
            "(place.extent) + place.line",
            "(place.extent) + 1",
            "every reject stands in the first line of its unit",
        ),
    ],
    ("megacp/prepare/media/reader.py", "tests/prepare/packs/test_urls.py"): [
        ("if (top.scheme, top.host, top.port) == server", "", "a redirect leads to another host"),
        ("if not url.raw_path.startswith(inside) or", "if", "a redirect leads out of the folder"),
        ("        path = plain\n", "        return False\n", "escapes of dots are no dots"),
    ],
    ("megacp/storage/url.py", "tests/prepare/packs/test_urls.py"): [
        ('"auto_decompress": False,', "", "a server's few bytes unpack to many"),
        ("[url.guard] if url.guard else []", "[]", "nobody looks where a redirect leads"),
    ],
    ("megacp/prepare/media/reader.py", "tests/prepare/packs/test_qwen_images.py"): [
        (
            "(begin + shift, end + shift, weight)",
            "(begin, end, weight)",
            "learned ranges do not move after a video",
        ),
    ],
    ("megacp/training/data/images.py", "tests/prepare/packs/test_qwen_images.py"): [
        ("- step - ended", "- step", "a branch counts on behind its sibling"),
        ("= grids.max(1)", "= grids[:, 0]", "text goes on within a wide image"),
        ("within // columns", "within % columns", "rows count columns"),
        ("units.grids[mine]", "units.grids", "a rank has the grids of all ranks"),
    ],
    ("megacp/training/data/vision/decoding.py", "tests/prepare/packs/test_qwen_images.py"): [
        (
            "known.get(i, known[first])",
            "known.get(i, 0 * known[first])",
            "half a pair is followed by black",
        ),
    ],
    ("megacp/prepare/packs/writer.py", "tests/prepare/packs/test_qwen_images.py"): [
        (
            "_GRID_ROW.pack(*unit.grid)",
            "_GRID_ROW.pack(*unit.grid[::-1])",
            "grids are stored lying down",
        ),
    ],
}
