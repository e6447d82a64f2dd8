// SPDX-License-Identifier: Apache-2.0

// Package systemdtest runs a server that uses package handover, with the units of
// examples/systemd, under a real systemd: PID 1 of namespaces that the test makes.
// It has nothing but tests.
//
// They need root, the Debian package systemd, and a cgroup v2 hierarchy. With the
// variable INSTAR_TEST_SYSTEMD=trixie, or another release of Debian, in the environment,
// the systemd is that release's, with everything that it depends on; apt fetches it, and
// nothing is installed.
package systemdtest
