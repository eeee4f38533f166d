"""What can make a write run twice or a run be lost: judged over gathered facts, by the doctor and by every worker."""
