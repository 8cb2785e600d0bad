//! One integration binary, so that it links once.
mod order_sim;
