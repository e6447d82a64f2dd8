// SPDX-License-Identifier: Apache-2.0

// Package metrics tells Prometheus about groups and handovers.
//
// A [Collector] reads the groups of a machine, or those that a server has open, at
// each scrape: it keeps no goroutine and nothing open in between. What it tells is in
// docs/metrics.md. Labels are bounded: a group has at most
// dispatch.Options.MaxGenerations generations at a time, and those that are gone are
// no longer told.
//
//	collector := metrics.New(metrics.Options{})
//	prometheus.MustRegister(collector)
//
// [Handler] and [Write] are for programs that have no registry of their own, such as
// "instar metrics".
//
// Reading a group needs the rights to its pins: the collector runs as the group's owner
// or as root. Before Linux 5.19 it needs CAP_BPF where kernel.unprivileged_bpf_disabled
// is set, as every process of a group does.
package metrics
