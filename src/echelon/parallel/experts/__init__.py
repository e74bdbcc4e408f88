"""Mixture of experts: layers that send each token to a few of many experts, and experts divided over ranks.

    MoE               a layer with a router, experts and load balancing. Plain PyTorch in one process
    GroupedExperts    SwiGLU experts, computed by grouped matrix products; `StackedExperts` are the user's own modules
    auxiliary_loss    the loss term of layers with `balance="auxiliary"`
    expert_loads      each expert's share of the tokens in the latest update

`Layout(ep=n)` divides the experts of every layer over n ranks (`distribute`): each token travels to the ranks that have its
experts and back (`Dispatch`). No token is ever dropped.
"""
