package meta

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWatermarks(t *testing.T) {
	w, err := ParseWatermarks(" #10=0, dram = 60% ,70 ,#3=50%,cxl=100%")
	require.NoError(t, err)
	require.Equal(t, "70%,cxl=100%,dram=60%,#3=50%,#10=0%", w.String())
	again, err := ParseWatermarks(w.String())
	require.NoError(t, err)
	require.Equal(t, w, again)
	for _, c := range []struct {
		tier string
		id   DeviceID
		want uint64
	}{{"dram", 1, 60}, {"cxl", 2, 100}, {"dram", 3, 50}, {"cxl", 10, 0}, {"ssd", 4, 70}} {
		require.Equal(t, c.want, w.For(c.tier, c.id), "%s #%d", c.tier, c.id)
	}
	w, err = ParseWatermarks("80%")
	require.NoError(t, err)
	require.Equal(t, "80%", w.String())
	require.Empty(t, w.Named())
}

func TestWatermarksThatAreNone(t *testing.T) {
	for text, why := range map[string]string{
		"":                       `"" is no percentage`,
		"-1":                     `"-1" is no percentage`,
		"101%":                   `"101%" is no percentage`,
		"70%%":                   `"70%%" is no percentage`,
		"70%,dram":               `"dram" is no percentage: write one for all devices`,
		"70%,dram=":              `"" is no percentage`,
		"dram=60%":               "begin with it, as in 70%,dram=60%",
		"70%,60%":                "the percentage of all devices\" is given twice",
		"70%,dram=1,dram=2":      `"dram" is given twice`,
		"70%,ssd=60%":            "ssd is the slowest tier",
		"70%,hbm=60%":            `"hbm" is neither a tier (cxl, dram) nor a device (#3)`,
		"70%,#0=60%":             `"#0" is neither`,
		"70%,#03=60%":            `"#03" is neither`,
		"70%,#4294967296=1":      `neither`,
		"70%,3=60%":              `"3" is neither`,
		"70%,=60%":               `"" is neither`,
		"70%" + many(",#%d=1%%"): "at most 256",
	} {
		_, err := ParseWatermarks(text)
		require.ErrorContains(t, err, why, text)
	}
}

func many(format string) string {
	var b strings.Builder
	for i := range maxWatermarks + 1 {
		fmt.Fprintf(&b, format, i+1)
	}
	return b.String()
}
