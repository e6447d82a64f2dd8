// SPDX-License-Identifier: Apache-2.0

package build

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// A test binary has no revision, so it is named by its file.
func TestID(t *testing.T) {
	info, err := os.Stat("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	id := ID()
	if size, _, ok := strings.Cut(id, "-"); ok && size != strconv.FormatInt(info.Size(), 10) {
		t.Errorf("ID() = %q for a file of %d bytes", id, info.Size())
	} else if !ok && len(id) != 12 {
		t.Errorf("ID() = %q", id)
	}
	if id != ID() {
		t.Error("two calls differ")
	}
}
