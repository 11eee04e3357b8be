"""Starting the ranks of a job and starting them again: torchrun's own agent, and what decides between two attempts.

Read in this order: ``supervisor`` (the attempts one after the other, who is to blame, whether to go on), ``agent`` (one
attempt: ranks, signals, several hosts), ``warm`` (the process from which ranks are forked). ``slurm`` writes a batch
script, and ends each of its starts.
"""
