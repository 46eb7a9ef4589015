"""Files: checked reading, atomic writing, locks, checksums and logs."""
