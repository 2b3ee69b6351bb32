import os

# Between its parallel regions torch's OpenMP spins for milliseconds, on cores that our own kernels and the other
# stages need. It reads this when it is loaded, by whichever of our modules imports torch first.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
