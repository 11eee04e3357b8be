"""Starting the ranks of a job and starting them again: torchrun's own agent, and what decides between two attempts.

Read in this order: ``policy`` (who is to blame, whether to go on), ``history`` (what an attempt has left behind),
``signals`` (those of the launcher), ``agent`` (one attempt), ``supervisor`` (the attempts one after the other).
``slurm`` writes a batch script,
``requeue`` ends each of its starts; ``told`` is what the ranks tell both.
``poison`` knows the samples that end attempts. ``warm`` starts the process from which ranks are forked: ``warm_server``
is that process, ``stand_in`` takes a rank's place in the agent's eyes, ``as_python`` runs a command in a rank.
"""
