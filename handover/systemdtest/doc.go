// SPDX-License-Identifier: Apache-2.0

// Package systemdtest runs a server that uses package handover, with the units of
// examples/systemd, under a real systemd: PID 1 of namespaces that the test makes.
// It has nothing but tests.
//
// They need root, the Debian package systemd, and a cgroup v2 hierarchy.
package systemdtest
