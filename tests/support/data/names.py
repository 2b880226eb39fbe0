"""Names of files and folders, drawn from what file systems and S3 take."""

from hypothesis import strategies as st

SIGNS = " '\"$`\\!#%&()*+,-.:;<=>?@[]^_{|}~"
ALPHABETS = ("äöüßéñø", "中文テスト", "Ελληνικά", "עברית", "😀🚀", "\u00a0\u3000\u200b", SIGNS, "abcXYZ019")
LONGEST = 200  # bytes; file systems take 255, and files beside a run's own have longer names than it

names = st.text(
    st.one_of(st.sampled_from("".join(ALPHABETS)), st.characters(exclude_categories=("C", "Zl", "Zp"))),
    min_size=1,
    max_size=LONGEST,
).filter(lambda name: "/" not in name and name.strip(".") and len(name.encode()) <= LONGEST)
"""Any name that a folder may have, but for control characters."""
