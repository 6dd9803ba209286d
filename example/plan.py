"""Plan the tables of a training for a cluster that is only described; nothing is launched.

./run.sh plan --hosts 16 --gpus_per_host 8 --data_path shop --embedding_dim 64
./run.sh plan --help
"""

import recsuite as rs
from example import make_model
from recsuite.extras import plan

if __name__ == "__main__":
    rs.run_script(lambda: plan.main(model=make_model))
