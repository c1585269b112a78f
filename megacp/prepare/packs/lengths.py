"""Measure the documents of an input before packing, in order to choose the row length."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass

from megacp.prepare.packs.settings import BuildSettings, checked
from megacp.prepare.packs.unit import UnitBuilder, UnitRun
from megacp.prepare.records.read import plan_units
from megacp.storage.place import place_of, size_of

# Number of documents after which measuring stops: about ten seconds with a chat template.
MOST_DOCUMENTS = 20_000
# Number of documents whose individual lengths are returned.
_SOME = 1_000


@dataclass(frozen=True)
class Lengths:
    """Numbers of documents and tokens in an input."""

    documents: int
    """Number of measured documents."""
    tokens: int
    """Total tokens of these documents, including image tokens and end-of-document tokens."""
    longest: int
    """Tokens of the longest document."""
    longest_whole: int
    """Tokens of the longest document that is not plain text; 0 if there is only plain text.

    Such documents should not be cut: the end of a conversation would lose its question, and
    documents with images or branches are never cut.
    """
    talks: int
    """Number of documents with answers: conversations and instructions, but not plain texts."""
    is_whole: bool
    """Whether all documents were measured."""
    some: tuple[int, ...]
    """Individual lengths of the first documents, in tokens."""
    share: float
    """Estimated fraction of the input that the measured documents represent, in (0, 1]."""

    @property
    def all_documents(self) -> int:
        """Estimated number of documents in the whole input."""
        return round(self.documents / self.share)

    @property
    def all_tokens(self) -> int:
        """Estimated number of tokens in the whole input."""
        return round(self.tokens / self.share)


def measure(settings: BuildSettings, most_documents: int = MOST_DOCUMENTS) -> Lengths:
    """Return the lengths that the first documents of an input would have in a build.

    Nothing is written, and `settings.seq_length` is ignored. Raise ValueError for invalid settings
    or input, and for a refused record.
    """
    settings = checked(settings)
    paths = settings.input
    if settings.image_rules is not None:
        rules = settings.image_rules.with_token_ids(settings.load_tokenizer())
        settings = dataclasses.replace(settings, image_rules=rules)
    builder = UnitBuilder(settings)
    units = plan_units(settings.input, settings.bytes_per_unit)
    all_bytes = sum(size_of(place_of(path)) for path in paths)
    read_bytes = 0
    lengths: list[int] = []
    longest_whole = 0
    talks = 0
    with tempfile.TemporaryFile() as spool:
        for unit in units:
            for documents in UnitRun(builder, unit, spool).documents():
                for entry, document in documents:
                    tokens = len(document.tokens)
                    lengths.append(tokens)
                    if entry.forms:
                        talks += 1
                    if entry.forms or document.units or document.branch_starts:
                        longest_whole = max(longest_whole, tokens)
                # The images of these documents are no longer needed.
                spool.truncate(0)
                if len(lengths) >= most_documents:
                    break
            read_bytes += sum(extent.stop - extent.start for extent in unit.extents)
            if len(lengths) >= most_documents:
                break
    if not lengths:
        raise ValueError(f"--input {', '.join(paths)} contains no records")
    # A partly read unit counts as completely read, so the estimate tends to be low.
    is_whole = len(lengths) < most_documents
    share = 1.0 if is_whole else read_bytes / all_bytes
    return Lengths(
        documents=len(lengths),
        tokens=sum(lengths),
        longest=max(lengths),
        longest_whole=longest_whole,
        talks=talks,
        is_whole=is_whole,
        some=tuple(lengths[:_SOME]),
        share=share,
    )
