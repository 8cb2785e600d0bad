//! The fleet: pools, workers, their declared ranks and endpoints.
//!
//! Knows no socket and not the index.
