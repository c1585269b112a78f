"""Mistakes in the code that the tests of this folder detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/media/requests.py", "tests/prepare/media/test_requests.py"): [
        ("if wanted != found:", "if False:", "a requested size is ignored"),
        ("if frames != taken:", "if False:", "requested frames per second are ignored"),
        (
            "rules.resized_to(size, num_frames, pixels)",
            "rules.resized_to(size, num_frames)",
            "requested limits of pixels are ignored",
        ),
    ],
    ("megacp/training/data/vision/qwen3_5.py", "tests/prepare/media/test_requests.py"): [
        (
            "(limit // num_frames for limit in self.video_resize_pixels)",
            "self.video_resize_pixels",
            "a frame may be as large as the whole video",
        ),
    ],
    ("megacp/prepare/media/reader.py", "tests/prepare/media/test_requests.py"): [
        (
            "path if os.path.exists(path) else unquote(path)",
            "unquote(path)",
            "a file name with an escape is not found",
        ),
    ],
    ("megacp/prepare/records/forms.py", "tests/prepare/media/test_requests.py"): [
        ("yield filled(kind) | asked", "yield filled(kind)", "a request at a placeholder is lost"),
        ("if form or rules.media:", "if rules.media:", "an image is learned as text"),
    ],
    ("megacp/engine/rows/image_shards.py", "tests/prepare/media/test_molmo2_rules.py"): [
        (
            "running[start] + low, start) - 1",
            "running[start] + low, start)",
            "a rank takes one unit too many",
        ),
        ("start = min(room, units - (filled - rank - 1))", "start = room", "ranks get no units"),
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
            "older processor files override the newest one",
        ),
        ("if has_older:", "if True:", "older names of sizes apply to videos"),
        (
            '"size" not in part or (size is None and has_older)',
            "size is None",
            "a null counts as a missing size",
        ),
        (
            '"do_normalize": (True, False)',
            '"do_normalize": (True, True)',
            "a skipped normalisation is accepted",
        ),
        (
            "_normalized(_CLIP_MEAN, _CLIP_DEVIATION)",
            "_normalized(_HALF, _HALF)",
            "a missing mean gets the wrong default",
        ),
        (
            "if _acts_otherwise(given, expected):",
            "if False:",
            "a step that a folder switches off is taken",
        ),
        (
            "        if not problems and agrees:",
            "        if agrees:",
            "videos use unsupported settings of images",
        ),
    ],
    ("megacp/storage/files.py", "tests/prepare/media/test_reader.py"): [
        (
            "os.open(name, _FOR_READING | os.O_NOFOLLOW, ",
            "os.open(name, _FOR_READING, ",
            "a replaced file leads outside the root",
        ),
        (
            "inner = os.open(\n                folder, _FOR_READING | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor\n            )",
            "inner = os.open(folder, _FOR_READING | os.O_DIRECTORY, dir_fd=descriptor)",
            "a replaced folder leads outside the root",
        ),
    ],
    ("megacp/prepare/media/reader.py", "tests/prepare/media/test_reader.py"): [
        (
            "return url.content(limit)",
            "return url.content(LARGEST_ITEM)",
            "an endless image takes 2 GiB",
        ),
        (
            "read_within(stream, path, limit)",
            "read_within(stream, path, LARGEST_ITEM)",
            "file sizes are not limited",
        ),
        (
            "if os.path.commonpath((path, str(self._root))) != self._root:",
            "if False:",
            "a path leads outside the root",
        ),
    ],
    ("megacp/training/data/vision/decoding.py", "tests/prepare/media/test_pixels.py"): [
        (
            "[i for i in range(unit * step, (unit + 1) * step) if i not in known]",
            "range(unit * step, (unit + 1) * step)",
            "cached frames are decoded again",
        ),
        (
            "= self._videos.pop(data, {})",
            "= self._videos.pop(data[:0], {})",
            "cached frames are lost",
        ),
        ("len(video[0]) + sum", "sum", "cached files do not count towards the limit"),
    ],
    ("megacp/training/data/vision/qwen3_5.py", "tests/prepare/media/test_qwen3_5_rules.py"): [
        ("round(count / step) * step", "count", "the number of frames is not rounded to pairs"),
        (
            "(0, 2, 5, 3, 6, 8, 1, 4, 7)",
            "(0, 2, 3, 5, 6, 8, 1, 4, 7)",
            "the patches of a token are separated",
        ),
        (
            "(width, pixels.shape[0])",
            "(pixels.shape[1], height)",
            "columns are resized before rows",
        ),
        (
            "frames[-1] / fps",
            "frames[0] / fps",
            "an incomplete pair gets a wrong time",
        ),
        (
            "shrink = math.sqrt(count *",
            "shrink = math.sqrt(",
            "each frame may use the pixels of the whole video",
        ),
        ('"video_patch", self)', '"image_patch", self)', "a video gets image tokens"),
    ],
    ("megacp/training/data/vision/molmo2.py", "tests/prepare/media/test_molmo2_rules.py"): [
        (
            "(size // 2, size - size // 2)",
            "(size - size // 2, size // 2)",
            "the larger half of the padding is at the start",
        ),
        ("index[:-1, :, -right:]", "index[1:, :, -right:]", "a margin is cut on the wrong side"),
        ("grid + rules.patches_per_crop", "grid", "high-resolution windows pool the small crop"),
        (
            "np.array(rules.image_std, np.float32) * np.float32(255)",
            "np.array(rules.image_std, np.float32) * np.float32(256)",
            "pixels are scaled by 256",
        ),
        (
            "windows = grid.reshape(rows, pool[0], columns, pool[1]).swapaxes(1, 2)",
            "windows = grid.reshape(rows, pool[0], columns, pool[1])",
            "windows consist of rows of patches",
        ),
        (
            "(np.arange(after, dtype=np.float32) + half) - half",
            "(np.arange(after, dtype=np.float32) + half) - np.float32(0)",
            "pixels are half a position off",
        ),
    ],
}
