"""`python -m distbench.worker.torchrun ...`: torchrun itself, made to die with the command that started it."""

from distbench.worker.rank.parent_death import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main()
