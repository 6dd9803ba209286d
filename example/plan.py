"""Plan the tables of a training for a cluster that is only described; nothing is launched.

./run.sh plan --hosts 16 --gpus_per_host 8 --data_path shop --embedding_dim 64
./run.sh plan --help
"""

import recsuite as rs


def main() -> int:
    """Plan, and return the exit status: 2 for a mistake or tables that do not fit."""
    return rs.exit_status(plan)


def plan() -> int:
    """Plan the tables of the models of example.py."""
    import recsuite.extras.plan as planner
    from example import make_model

    return planner.main(model=make_model)


if __name__ == "__main__":
    rs.run_script(main)
