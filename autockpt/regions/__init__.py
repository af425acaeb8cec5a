"""What emitted code calls while it runs: regions that run again, and what they keep.

``checkpointed`` calls a region; ``kept``, ``skipped`` and ``replays`` are asked inside one;
``remade`` and ``taken`` hand it inputs that it can make again; ``statistic`` gives it buffers.
"""
