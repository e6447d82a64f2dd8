// SPDX-License-Identifier: Apache-2.0

// Package archtest tests who imports whom. It has nothing but tests; the rules
// are in its test file, and ARCHITECTURE.md tells why they are so.
package archtest
