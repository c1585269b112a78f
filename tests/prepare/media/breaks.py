"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/rows/image_shards.py", "tests/prepare/media/test_molmo2_rules.py"): [
        (
            "running[start] + low, start) - 1",
            "running[start] + low, start)",
            "a rank takes one unit too many",
        ),
        ("start = min(room, units - (filled - rank - 1))", "start = room", "ranks starve"),
        (
            '(start, stop), side="right"',
            '(start, stop), side="left"',
            "units of a rank are one off",
        ),
    ],
    ("megacp/prepare/media/processor_files.py", "tests/prepare/media/test_processor_files.py"): [
        (
            "    inside = whole.get(key)\n",
            "    inside = None\n",
            "older processor files count before the newest",
        ),
        ("if has_older:", "if True:", "older names of sizes count for videos"),
        (
            '"size" not in part or (size is None and has_older)',
            "size is None",
            "a null is a missing size",
        ),
        (
            '"do_normalize": (True, False)',
            '"do_normalize": (True, True)',
            "videos that stay bytes are normalised",
        ),
        (
            "_normalized(_CLIP_MEAN, _CLIP_DEVIATION)",
            "_normalized(_HALF, _HALF)",
            "a missing mean is another one",
        ),
        (
            "if _acts_otherwise(given, expected):",
            "if False:",
            "steps that a folder leaves out are taken",
        ),
        (
            "        if not problems and all(",
            "        if all(",
            "videos follow images against the library",
        ),
    ],
    ("megacp/storage/files.py", "tests/prepare/media/test_reader.py"): [
        (
            "os.open(name, _FOR_READING | os.O_NOFOLLOW, ",
            "os.open(name, _FOR_READING, ",
            "an exchanged file leads out",
        ),
        (
            "inner = os.open(\n                folder, _FOR_READING | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor\n            )",
            "inner = os.open(folder, _FOR_READING | os.O_DIRECTORY, dir_fd=descriptor)",
            "an exchanged folder leads out",
        ),
    ],
    ("megacp/prepare/media/reader.py", "tests/prepare/media/test_reader.py"): [
        (
            "return url.content(limit)",
            "return url.content(LARGEST_ITEM)",
            "an image without an end takes 2 GiB",
        ),
        (
            "read_within(stream, path, limit)",
            "read_within(stream, path, LARGEST_ITEM)",
            "files have no bound",
        ),
        (
            "if os.path.commonpath((path, str(self._root))) != self._root:",
            "if False:",
            "a path leads out of the root",
        ),
    ],
    ("megacp/training/data/vision/decoding.py", "tests/prepare/media/test_pixels.py"): [
        (
            "[i for i in range(unit * step, (unit + 1) * step) if i not in known]",
            "range(unit * step, (unit + 1) * step)",
            "frames that are kept are decoded again",
        ),
        (
            "= self._videos.pop(data, {})",
            "= self._videos.pop(data[:0], {})",
            "kept frames are forgotten",
        ),
        ("len(video[0]) + sum", "sum", "kept files cost nothing"),
    ],
    ("megacp/training/data/vision/qwen3_5.py", "tests/prepare/media/test_qwen3_5_rules.py"): [
        ("round(count / step) * step", "count", "the frames of a video are not counted in pairs"),
        (
            "(0, 2, 5, 3, 6, 8, 1, 4, 7)",
            "(0, 2, 3, 5, 6, 8, 1, 4, 7)",
            "the patches of a token are torn apart",
        ),
        (
            "(width, pixels.shape[0])",
            "(pixels.shape[1], height)",
            "columns are blended before rows",
        ),
        (
            "frames[-1] / fps",
            "frames[0] / fps",
            "half a pair has the mean of two times",
        ),
        (
            "shrink = math.sqrt(count *",
            "shrink = math.sqrt(",
            "each frame has all pixels of the video",
        ),
        ('"video_patch", self)', '"image_patch", self)', "a video is told as images"),
    ],
    ("megacp/training/data/vision/molmo2.py", "tests/prepare/media/test_molmo2_rules.py"): [
        (
            "(size // 2, size - size // 2)",
            "(size - size // 2, size // 2)",
            "the larger half of the padding is at the start",
        ),
        ("index[:-1, :, -right:]", "index[1:, :, -right:]", "a margin is cut at the wrong side"),
        ("grid + rules.patches_per_crop", "grid", "high-resolution windows pool the small crop"),
        (
            "np.array(rules.image_std, np.float32) * np.float32(255)",
            "np.array(rules.image_std, np.float32) * np.float32(256)",
            "pixels are scaled by 256",
        ),
        (
            "windows = grid.reshape(rows, pool[0], columns, pool[1]).swapaxes(1, 2)",
            "windows = grid.reshape(rows, pool[0], columns, pool[1])",
            "windows are rows of patches",
        ),
        (
            "(np.arange(after, dtype=np.float32) + half) - half",
            "(np.arange(after, dtype=np.float32) + half) - np.float32(0)",
            "pixels are half a place off",
        ),
    ],
}
