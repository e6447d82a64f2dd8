// SPDX-License-Identifier: Apache-2.0

// Package testutil gives tests what they need of a real kernel: a network
// namespace and a bpffs of their own, and child processes made from functions
// of the test binary. Only test files import it.
//
// A package that uses it has
//
//	func TestMain(m *testing.M) { testutil.Main(m) }
//
// which runs the children and fails the package when goroutines or file
// descriptors are left over at the end.
//
// A test that lacks a privilege or a tool is skipped with the reason. With
// INSTAR_TEST_NO_SKIP=1 in the environment it fails instead, so that a
// complete environment cannot lose tests unnoticed.
package testutil
