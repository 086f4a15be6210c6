"""Arguments that tests of the planner's commands share: a small search, and a plan that fits."""

SMALL = ["--model", "llama3-8b", "--cluster", "h100x16", "--batch", "1M"]
PLAN = ["--plan", "tp=2,pp=4,zero=1,micro_batch=2"]
