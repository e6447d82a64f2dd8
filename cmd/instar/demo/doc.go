// SPDX-License-Identifier: Apache-2.0

// Package demo shows upgrades under load and measures what they lose.
//
// [Run] starts this program again in a network and mount namespace of its own
// (the sandbox), so nothing on the machine is touched: there a bpffs is mounted,
// real server processes are started and replaced while a load client in the
// sandbox keeps connections open, opens new ones and moves to new ports. The
// same load can run against two naive methods: stop then start, and plain
// SO_REUSEPORT.
//
// Nothing is left behind, whichever of the processes is killed (package
// internal/sandbox). The sandbox writes what happens as lines of JSON; the
// command shows it and renders the report.
package demo
