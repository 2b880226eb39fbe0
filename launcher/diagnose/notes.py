"""What has to be said with the figures."""

ANISOTROPY = (
    "A diagnosis, not an objective. Normalising vectors does not cure anisotropy: a cosine ignores how long they are. "
    "Whitening does, fitted here on other texts than those measured. Less isotropy can serve a task better. IsoScore "
    "is 0 for a line and 1 for equal variance in all directions; the effective rank counts directions."
)
